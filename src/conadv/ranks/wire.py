"""The message format of a twin between ranks: labels, images and a note, as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conadv.core.batch import Batch


@dataclass(frozen=True)
class Wire:
    """The message format of a twin, which sender and receiver know."""

    images: int
    """Images per chunk."""
    shape: tuple[int, ...]
    """The shape of one image."""
    dtype: torch.dtype
    """The dtype of the images on both sides."""
    as_bytes: bool
    """Whether pixels are multiples of 1/255, so that one byte per pixel is exact."""
    label_shape: tuple[int, ...] = ()
    """The shape of one label: () for class indices, (classes,) for class probabilities."""
    label_dtype: torch.dtype = torch.int64

    @property
    def size(self) -> int:
        """Bytes of a message: labels, images, and one byte for a note (see `RankHandoff.begin_step`)."""
        pixel = 1 if self.as_bytes else self.dtype.itemsize
        return self._label_bytes + self.images * pixel * torch.Size(self.shape).numel() + 1

    @property
    def _label_bytes(self) -> int:
        return self.images * self.label_dtype.itemsize * torch.Size(self.label_shape).numel()

    def pack(self, twin: Batch, note: int = 0) -> Tensor:
        images = twin.images.detach()
        images = images.mul(255).round_().to(torch.uint8) if self.as_bytes else images.to(self.dtype)
        known = twin.labels.is_floating_point() == self.label_dtype.is_floating_point
        assert known, "labels of the kind that was announced"
        parts = (twin.labels.to(self.label_dtype), images)
        noted = torch.full((1,), note, dtype=torch.uint8, device=images.device)
        return torch.cat([*(part.contiguous().flatten().view(torch.uint8) for part in parts), noted])

    def unpack(self, message: Tensor) -> Batch:
        labels, images, _ = message.split([self._label_bytes, self.size - self._label_bytes - 1, 1])
        # A clone is aligned, wherever its bytes are in the message.
        pixels = images.to(self.dtype).div_(255) if self.as_bytes else images.clone().view(self.dtype)
        numbers = labels.clone().view(self.label_dtype)
        return Batch(pixels.view(self.images, *self.shape), numbers.view(self.images, *self.label_shape))

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        names = {name: str(getattr(self, name)).removeprefix("torch.") for name in ("dtype", "label_dtype")}
        shapes = {"shape": list(self.shape), "label_shape": list(self.label_shape)}
        return {"images": self.images, "as_bytes": self.as_bytes, **shapes, **names}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Wire:
        """Restore the format from what `to_json` returned."""
        dtypes = {name: getattr(torch, fields[name]) for name in ("dtype", "label_dtype")}
        shapes = {name: tuple(fields[name]) for name in ("shape", "label_shape")}
        return cls(**{**fields, **dtypes, **shapes})


def wire_of(batch: Batch, chunk_size: int, dtype: torch.dtype, exact_as_bytes: bool) -> Wire:
    """Return the message format for the twins of a batch.

    Args:
        batch: a batch as the loader yields it.
        chunk_size: images per chunk.
        dtype: the dtype of the model, to which images of bytes are converted.
        exact_as_bytes: whether twins of such images can be sent as bytes.
    """
    images, labels = batch.images, batch.labels
    if not isinstance(labels, Tensor) or labels.dim() == 0 or len(labels) != len(images):
        raise ValueError("twins travel with labels that are one tensor with a value per image: pass such a batch")
    came_as_bytes = images.dtype == torch.uint8
    return Wire(
        chunk_size,
        tuple(images.shape[1:]),
        dtype if came_as_bytes else images.dtype,
        as_bytes=came_as_bytes and exact_as_bytes,
        label_shape=tuple(labels.shape[1:]),
        label_dtype=labels.dtype,
    )
