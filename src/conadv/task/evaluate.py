"""Evaluation: accuracy and loss over all batches, on the images as they are and, if asked, under attack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.core.attack import Attack, Loss
from conadv.core.batch import to_pixels
from conadv.core.seeds import mix
from conadv.task.models import evaluating


@dataclass(frozen=True)
class Evaluation:
    """What a model does on all images of some data. Accuracies are in percent."""

    top1: float
    top5: float
    """The label is among the 5 likeliest; with fewer classes, among all."""
    loss: float
    """The mean over the images."""
    images: int
    robust_top1: float | None = None
    """top1 on attacked images; None: there was no attack."""


@dataclass
class _Totals:
    """Sums over images, so that batches of any size count by their images."""

    images: int = 0
    top1: int = 0
    top5: int = 0
    loss: float = 0.0
    robust_top1: int = 0


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    *,
    device: torch.device | str | None = None,
    attack: Attack | None = None,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
) -> Evaluation:
    """Evaluate a model in eval mode; its train/eval flags are as before afterwards.

    Args:
        model: the network.
        batches: of (images, labels, ...), images as bytes or floats in [0, 1].
        device: where the model is; None: where its first parameter is.
        attack: called with the model in eval mode. Of a split model it should attack what is evaluated here, the main
            branch with running statistics: `PGD(..., branch="main", statistics="running")`.
        loss: (logits, labels) to the mean over the images.
        seed: decides what is random in the attack.
    """
    like = next(model.parameters(), torch.empty(0))
    device = like.device if device is None else torch.device(device)
    totals = _Totals()
    with evaluating(model), torch.no_grad():
        for number, (raw_images, raw_labels, *_) in enumerate(batches):
            if len(raw_images) == 0:
                continue
            images = to_pixels(raw_images, device, like.dtype).to(like.dtype)
            logits = _logits(model, images)
            labels = _checked(raw_labels, logits.shape[1]).to(device)
            _add(totals, logits, labels, loss)
            if attack is not None:
                with torch.enable_grad():
                    attacked = attack(model, loss, images, labels, mix(seed, number))
                totals.robust_top1 += _hits(_logits(model, attacked.detach()), labels, 1)
    return _evaluation(totals, attacked=attack is not None)


def _add(totals: _Totals, logits: Tensor, labels: Tensor, loss: Loss) -> None:
    totals.images += len(labels)
    totals.top1 += _hits(logits, labels, 1)
    totals.top5 += _hits(logits, labels, 5)
    totals.loss += loss(logits, labels).item() * len(labels)


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """The model's outputs, with enough digits for a loss where the model has 16 bits."""
    outputs: Tensor = model(images)
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def _checked(labels: Tensor, classes: int) -> Tensor:
    """The labels as whole numbers, each of them one of the model's classes."""
    if labels.is_floating_point():
        raise ValueError(f"labels are {labels.dtype}: give the number of a class for each image")
    for label in (int(labels.min()), int(labels.max())):
        if not 0 <= label < classes:
            raise ValueError(f"label {label} is outside of the model's {classes} classes, 0 to {classes - 1}")
    return labels.long()


def _hits(logits: Tensor, labels: Tensor, count: int) -> int:
    """How many labels are among the `count` likeliest classes."""
    likeliest = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return int((likeliest == labels[:, None]).sum())


def _evaluation(totals: _Totals, attacked: bool) -> Evaluation:
    images = totals.images
    if images == 0:
        raise ValueError("there are no images to evaluate on: check the data, or give a new iterator each time")
    return Evaluation(
        top1=100 * totals.top1 / images,
        top5=100 * totals.top5 / images,
        loss=totals.loss / images,
        images=images,
        robust_top1=100 * totals.robust_top1 / images if attacked else None,
    )
