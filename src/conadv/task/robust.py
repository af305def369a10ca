"""Accuracy under attack: of images that every attack may change, and of twins as training sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.core.attack import Attack, Loss, without_trace
from conadv.core.batch import Batch, to_pixels
from conadv.core.seeds import mix
from conadv.core.twins import Shuffle
from conadv.task.models import evaluating

Batches = Iterable[Sequence[Tensor]]
# (model, loss, images, labels, seed) -> changed images; the model is in eval mode.
Adversary = Callable[[nn.Module, Loss, Tensor, Tensor, int], Tensor]


def count_robust(
    model: nn.Module,
    batches: Batches,
    attack: Adversary,
    *,
    restarts: int = 1,
    loss: Loss = F.cross_entropy,
    first: int = 0,
    autocast: torch.dtype | None = None,
) -> tuple[int, int]:
    """Count the images that are classified correctly as they are and under an attack from each of its random starts.

    An image that was misclassified once is not attacked again.

    Args:
        model: the network, evaluated and attacked in eval mode.
        batches: of (images, labels, ...), images as bytes or floats in [0, 1].
        attack: changes images so that they are misclassified.
        restarts: how often it is tried, with other random numbers.
        loss: (logits, labels) to the mean over the images, which the attack increases.
        first: number of the first batch; the random numbers of the attack depend on the number of its batch.
        autocast: 16-bit type to compute in; None: the dtype of the weights.

    Returns:
        How many images are robust, and how many there are.
    """
    like = next(model.parameters())
    precision = nullcontext() if autocast is None else torch.autocast(like.device.type, autocast)
    robust = count = 0
    with evaluating(model), torch.no_grad(), precision:
        for number, (raw_images, raw_labels, *_) in enumerate(batches):
            images = to_pixels(raw_images, like.device, like.dtype).to(like.dtype)
            labels = raw_labels.long().to(like.device)
            count += len(labels)
            images, labels = _survivors(model, images, images, labels)
            for restart in range(restarts):
                if len(labels):
                    with torch.enable_grad():
                        changed = attack(model, loss, images, labels, mix(0, first + number, 0, restart))
                    images, labels = _survivors(model, changed.detach(), images, labels)
            robust += len(labels)
    return robust, count


def count_twin_hits(
    model: nn.Module,
    batches: Batches,
    attack: Attack,
    branch: str,
    *,
    loss: Loss = F.cross_entropy,
    first: int = 0,
    autocast: torch.dtype | None = None,
    shuffled: int = 1,
) -> tuple[int, int]:
    """Count the twins that the model classifies correctly as it learns from them, without changing it.

    Each batch is attacked and classified as a chunk in training: with its own BatchNorm statistics, through `branch`.
    In between, the twins of every `shuffled` batches are shuffled.

    Returns:
        How many twins are classified correctly, and how many there are.
    """
    like = next(model.parameters())
    precision = nullcontext() if autocast is None else torch.autocast(like.device.type, autocast)
    hits = count = 0
    shuffle = Shuffle(shuffled)
    with in_training(model):
        for number, (raw_images, raw_labels, *_) in enumerate(batches):
            images = to_pixels(raw_images, like.device, like.dtype).to(like.dtype)
            labels = raw_labels.long().to(like.device)
            with precision:
                twins = attack(model, loss, images, labels, mix(0, first + number)).detach()
                for place, own in shuffle.add(first + number, Batch(twins, labels), first + number):
                    with torch.no_grad(), without_trace(model, branch, "batch", place):
                        hits += int((model(own.images).argmax(1) == own.labels).sum())
                    count += len(own.labels)
    return hits, count


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Put every module in training mode, and restore the mode of each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _survivors(model: nn.Module, changed: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images, with their labels, that are classified correctly after they were changed."""
    right = model(changed).argmax(1) == labels
    return images[right], labels[right]
