"""Evaluation: accuracy and loss over all batches. For accuracy under attack see `robust.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.core.attack import Loss
from conadv.core.batch import to_pixels
from conadv.task.models import evaluating


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Accuracies are in percent."""

    top1: float
    top5: float
    """The label is among the 5 most likely classes (or among all, if there are fewer)."""
    loss: float
    """The mean over the images."""
    images: int


def evaluate(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    *,
    device: torch.device | str | None = None,
    loss: Loss = F.cross_entropy,
    autocast: torch.dtype | None = None,
) -> Evaluation:
    """Evaluate a model in eval mode, and restore its train/eval modes afterwards.

    Args:
        model: the network.
        batches: of (images, labels, ...), images as bytes or floats in [0, 1].
        device: where the model is; None: where its first parameter is.
        loss: (logits, labels) to the mean over the images.
        autocast: 16-bit type to compute in, as in training; None: the dtype of the weights.
    """
    like = next(model.parameters(), torch.empty(0))
    device = like.device if device is None else torch.device(device)
    # Sums stay on the device and are read once. Counts are exact in float64.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    count = 0
    precision = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
    with evaluating(model), torch.no_grad(), precision:
        for raw_images, raw_labels, *_ in batches:
            if len(raw_images) == 0:
                continue
            images = to_pixels(raw_images, device, like.dtype).to(like.dtype)
            logits = _logits(model, images)
            labels = _checked(raw_labels, logits.shape[1]).to(device, non_blocking=True)
            count += len(labels)
            sums = [_hits(logits, labels, 1), _hits(logits, labels, 5), loss(logits, labels).double() * len(labels)]
            totals += torch.stack([part.to(totals) for part in sums])
    return _evaluation(count, totals.tolist())


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    """The model's outputs, in float32 or better: 16 bits are too few for a loss."""
    outputs: Tensor = model(images)
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


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


def _evaluation(images: int, totals: Sequence[float]) -> Evaluation:
    if images == 0:
        raise ValueError("no images to evaluate on: check the data, or pass a new iterator each time")
    top1, top5, loss = totals
    return Evaluation(100 * top1 / images, 100 * top5 / images, loss / images, images)
