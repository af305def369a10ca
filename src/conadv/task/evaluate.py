"""Evaluation over batches: accuracy and loss; accuracy under attack; accuracy on twins, as training sees them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.core.attack import Attack, Loss, without_trace
from conadv.core.batch import Batch, to_pixels
from conadv.core.pgd import PGD, Norm
from conadv.core.seeds import mix, untouched_randomness
from conadv.core.twins import Shuffle
from conadv.task.models import in_mode

Batches = Iterable[Sequence[Tensor]]
"""Of (images, labels, ...), images as bytes or floats in [0, 1]."""
Adversary = Callable[[nn.Module, Loss, Tensor, Tensor, int], Tensor]
"""(model, loss, images, labels, seed) -> changed images; the model is in eval mode."""


@dataclass(frozen=True)
class RobustTest:
    """How to measure robust accuracy: the share of images that stay correctly classified under every attack."""

    epsilon: float
    norm: Norm = "linf"
    steps: int = 20
    """Steps of PGD."""
    restarts: int = 2
    """How often PGD starts, at another random point each time."""
    images: int | None = None
    """How many images to attack, a fixed sample; None: all."""
    autoattack: bool = False
    """AutoAttack, once, instead of PGD."""

    def attack(self) -> Adversary:
        if self.autoattack:
            return AutoAttack(self.epsilon, self.norm)
        return robust_attack(self.epsilon, self.steps, norm=self.norm)


def robust_attack(epsilon: float, steps: int, branch: str = "main", norm: Norm = "linf") -> PGD:
    """Return PGD within `epsilon`, with a step size large enough to cross the ball and come back."""
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    return PGD(epsilon, size, steps, norm, random_start=1.0, branch=branch, statistics="running")


@dataclass(frozen=True)
class AutoAttack:
    """The standard ensemble of Croce and Hein (2020), by their own code: APGD-CE, APGD-T, FAB-T and Square."""

    epsilon: float
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pyautoattack") is None:
            raise ValueError("AutoAttack is not installed: pip install 'conadv[robust]'")

    def __call__(self, model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, seed: int = 0) -> Tensor:
        """Change the images within epsilon; `loss` is not used, since each of its attacks has its own."""
        import pyautoattack

        classes = model(images[:1]).shape[1]
        if classes < 4:
            raise ValueError(f"AutoAttack needs at least 4 classes, and this model has {classes}: use PGD")
        norm = {"linf": "Linf", "l2": "L2"}[self.norm]
        with untouched_randomness(images.device, seed):
            attack = pyautoattack.AutoAttack(
                model, norm=norm, eps=self.epsilon, seed=seed % 2**31, device=images.device
            )
            attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
            changed: Tensor = attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]
        return changed


def evaluate(model: nn.Module, batches: Batches) -> Tensor:
    """Evaluate a model in eval mode.

    Returns:
        Four numbers in float64, on the device: the images, those whose label is the most likely class, those whose
        label is among the 5 most likely ones (or among all, if there are fewer), and the sum of their losses.
    """
    device = _like(model).device
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # in which counts are exact
    with in_mode(model, training=False), torch.no_grad():
        for images, labels in inputs(model, batches):
            outputs: Tensor = model(images)
            logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # 16 bits are too few for a loss
            totals[0] += len(labels)
            totals[1] += _hits(logits, labels, 1)
            totals[2] += _hits(logits, labels, 5)
            totals[3] += F.cross_entropy(logits, labels).double() * len(labels)
    return totals


def count_robust(
    model: nn.Module, batches: Batches, attack: Adversary, *, restarts: int = 1, first: int = 0
) -> tuple[int, int]:
    """Count the images that are classified correctly as they are and under an attack from each of its random starts.

    The model is in eval mode. An image that was misclassified once is not attacked again.

    Args:
        attack: changes images so that they are misclassified.
        restarts: how often it is tried, with other random numbers.
        first: number of the first batch; the random numbers of the attack depend on the number of its batch.

    Returns:
        How many images are robust, and how many there are.
    """
    robust = count = 0
    with in_mode(model, training=False), torch.no_grad():
        for number, (images, labels) in enumerate(inputs(model, batches), first):
            count += len(labels)
            images, labels = _survivors(model, images, images, labels)
            for restart in range(restarts):
                if len(labels):
                    with torch.enable_grad():
                        changed = attack(model, F.cross_entropy, images, labels, mix(0, number, 0, restart))
                    images, labels = _survivors(model, changed.detach(), images, labels)
            robust += len(labels)
    return robust, count


@dataclass(frozen=True)
class TwinTest:
    """How a run generates twins, and groups and routes them when it learns from them."""

    attack: Attack
    branch: str
    chunk_size: int
    shuffled: int = 1
    """The twins of this many chunks are shuffled before they are learnt."""


def count_twin_hits(
    model: nn.Module, batches: Batches, twins: TwinTest, loss: Loss = F.cross_entropy, first: int = 0
) -> tuple[int, int]:
    """Count the twins that the model classifies correctly as it learns from them, without changing it.

    Each batch is attacked and classified as a chunk in training: with its own BatchNorm statistics. Random numbers
    depend on its number; the first one has the number `first`.

    Returns:
        How many twins are classified correctly, and how many there are.
    """
    shuffle = Shuffle(twins.shuffled)
    hits = count = 0
    with in_mode(model, training=True):
        for number, (images, labels) in enumerate(inputs(model, batches), first):
            changed = twins.attack(model, loss, images, labels, mix(0, number)).detach()
            for place, own in shuffle.add(number, Batch(changed, labels), number):
                with torch.no_grad(), without_trace(model, twins.branch, "batch", place):
                    hits += int((model(own.images).argmax(1) == own.labels).sum())
                count += len(own.labels)
    return hits, count


def _like(model: nn.Module) -> Tensor:
    return next(model.parameters(), torch.empty(0))


def inputs(model: nn.Module, batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """The images and labels of each batch as the model and its loss take them."""
    like = _like(model)
    for images, labels, *_ in batches:
        yield (
            to_pixels(images, like.device, like.dtype).to(like.dtype),
            labels.long().to(like.device, non_blocking=True),
        )


def _hits(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """How many labels are among the `count` most likely classes."""
    likeliest = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return (likeliest == labels[:, None]).sum()


def _survivors(model: nn.Module, changed: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images, with their labels, that are classified correctly after they were changed."""
    right = model(changed).argmax(1) == labels
    return images[right], labels[right]
