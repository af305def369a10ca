"""Checks of images, labels and loss: mistakes that would silently train wrongly."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.modules.loss import _Loss, _WeightedLoss

from conadv.core.attack import Attack, Loss

from .mean_loss import MeanLoss


class Checks:
    """Check the data that a method learns from; what would wait for the device is checked only once or a few times.

    Args:
        loss: from outputs and labels to the mean loss.
        chunk_size: images per chunk, or None.
        alone: the method was not given a place among other ranks.
    """

    def __init__(self, loss: Loss, chunk_size: int | None, alone: bool) -> None:
        self._loss = loss
        self._is_chunked = chunk_size is not None
        self._alone = alone
        self._seen_images = self._seen_labels = self._seen_loss = False
        self._mean = MeanLoss(loss, self._is_chunked)
        if isinstance(loss, _Loss) and loss.reduction != "mean":
            raise ValueError(f'the loss has reduction="{loss.reduction}": a method needs the mean, reduction="mean"')
        if self._is_chunked and isinstance(loss, _WeightedLoss) and loss.weight is not None:
            raise ValueError(
                "a loss with class weights is not the mean of its chunks: pass chunk_size=None, "
                "or multiply per-image losses by their weights and take the plain mean"
            )

    def begin_step(self) -> None:
        """Forget the chunks of the last step."""
        self._mean.begin_step()

    def look_at_images(self, attack: Attack, images: Tensor) -> None:
        """Check that the first images are in the range of the attack."""
        if not self._seen_images:
            attack.check_range(images)
            self._seen_images = True

    def look_at_labels(self, labels: Any) -> None:
        """Refuse labels that a loss ignores: each chunk would be divided by another number of images."""
        if not self._is_chunked or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        if self._seen_labels and labels.device.type != "cpu":  # looking again would wait for the device
            return
        self._seen_labels = True
        ignored = labels < 0
        if getattr(self._loss, "ignore_index", -1) >= 0:
            ignored |= labels == self._loss.ignore_index  # type: ignore[attr-defined]
        if bool(ignored.any()):
            raise ValueError(
                "labels that the loss ignores (below 0, or ignore_index) with chunks: each chunk would be averaged "
                "over another number of images; pass chunk_size=None, or drop these images"
            )

    def look_at_loss(self, loss: Any, outputs: Any, labels: Any, images: Tensor) -> None:
        """Check that the loss is a mean over the images, also over those of two chunks."""
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f'the loss returns {shape}, not one number: use reduction="mean"')
        if self._alone and not self._seen_loss and not bool(loss.isfinite()) and not bool(images.isfinite().all()):
            raise ValueError(
                f"the images have NaN or infinity, so the loss is {loss.item()}: look at how they are made (a division "
                "by 0 in the normalization?)"
            )
        self._seen_loss = True
        self._mean.look(loss, outputs, labels, len(images))
