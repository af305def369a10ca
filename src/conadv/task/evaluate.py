"""Evaluation over all batches: accuracy and loss; accuracy under attack; accuracy on twins, as training sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.core.attack import Attack, Loss, without_trace
from conadv.core.batch import Batch, to_pixels
from conadv.core.seeds import mix
from conadv.core.twins import Shuffle
from conadv.task.models import in_mode

Batches = Iterable[Sequence[Tensor]]
"""Of (images, labels, ...), images as bytes or floats in [0, 1]."""
Adversary = Callable[[nn.Module, Loss, Tensor, Tensor, int], Tensor]
"""(model, loss, images, labels, seed) -> changed images; the model is in eval mode."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Accuracies are in percent."""

    top1: float
    top5: float
    """The label is among the 5 most likely classes (or among all, if there are fewer)."""
    loss: float
    """The mean over the images."""
    images: int


def evaluate(model: nn.Module, batches: Batches, autocast: torch.dtype | None = None) -> Evaluation:
    """Evaluate a model in eval mode, and restore its train/eval modes afterwards.

    Args:
        model: the network.
        batches: of (images, labels, ...), images as bytes or floats in [0, 1].
        autocast: 16-bit type to compute in, as in training; None: the dtype of the weights.
    """
    device = _like(model).device
    # Sums stay on the device and are read once. Counts are exact in float64.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    count = 0
    with in_mode(model, training=False), torch.no_grad(), _precision(device, autocast):
        for images, raw_labels in _pixels(model, batches, device):
            outputs: Tensor = model(images)
            logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # 16 bits are too few for a loss
            labels = _checked(raw_labels, logits.shape[1]).to(device, non_blocking=True)
            count += len(labels)
            sums = [
                _hits(logits, labels, 1),
                _hits(logits, labels, 5),
                F.cross_entropy(logits, labels).double() * len(labels),
            ]
            totals += torch.stack([part.to(totals) for part in sums])
    if count == 0:
        raise ValueError("no images to evaluate on: check the data, or pass a new iterator each time")
    top1, top5, total = totals.tolist()
    return Evaluation(100 * top1 / count, 100 * top5 / count, total / count, count)


def count_robust(
    model: nn.Module,
    batches: Batches,
    attack: Adversary,
    *,
    restarts: int = 1,
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
        first: number of the first batch; the random numbers of the attack depend on the number of its batch.
        autocast: 16-bit type to compute in; None: the dtype of the weights.

    Returns:
        How many images are robust, and how many there are.
    """
    device = _like(model).device
    robust = count = 0
    with in_mode(model, training=False), torch.no_grad(), _precision(device, autocast):
        for number, (images, raw_labels) in enumerate(_pixels(model, batches, device)):
            labels = raw_labels.long().to(device)
            count += len(labels)
            images, labels = _survivors(model, images, images, labels)
            for restart in range(restarts):
                if len(labels):
                    with torch.enable_grad():
                        changed = attack(model, F.cross_entropy, images, labels, mix(0, first + number, 0, restart))
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
    device, shuffle = _like(model).device, Shuffle(shuffled)
    hits = count = 0
    with in_mode(model, training=True):
        for number, (images, raw_labels) in enumerate(_pixels(model, batches, device), first):
            labels = raw_labels.long().to(device)
            with _precision(device, autocast):
                twins = attack(model, loss, images, labels, mix(0, number)).detach()
                for place, own in shuffle.add(number, Batch(twins, labels), number):
                    with torch.no_grad(), without_trace(model, branch, "batch", place):
                        hits += int((model(own.images).argmax(1) == own.labels).sum())
                    count += len(own.labels)
    return hits, count


def _like(model: nn.Module) -> Tensor:
    return next(model.parameters(), torch.empty(0))


def _precision(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if autocast is None else torch.autocast(device.type, autocast)


def _pixels(model: nn.Module, batches: Batches, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of each batch as the model takes them, and their labels as they are."""
    dtype = _like(model).dtype
    for images, labels, *_ in batches:
        if len(images):
            yield to_pixels(images, device, dtype).to(dtype), labels


def _checked(labels: Tensor, classes: int) -> Tensor:
    """Labels as int64, checked to be classes of the model."""
    if labels.is_floating_point():
        raise ValueError(f"labels are {labels.dtype}: give the number of a class for each image")
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < classes:
            raise ValueError(f"label {label} is not one of the model's {classes} classes, 0 to {classes - 1}")
    return labels.long()


def _hits(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """How many labels are among the `count` most likely classes."""
    likeliest = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return (likeliest == labels[:, None]).sum()


def _survivors(model: nn.Module, changed: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images, with their labels, that are classified correctly after they were changed."""
    right = model(changed).argmax(1) == labels
    return images[right], labels[right]
