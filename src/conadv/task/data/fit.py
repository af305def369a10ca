"""Resize images to one size, and keep them decoded in memory if they fit."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from conadv.machine import free_memory
from conadv.task.data.source import Arrays, DataSet, Picture, Planes, Source

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""

_MIB = 2**20


@dataclass(frozen=True)
class Fit:
    """Resize the shorter side to `size` × `zoom`, then crop the centre: what evaluation sees."""

    size: int | None = None
    """Height and width of the result; None leaves images as they are."""
    zoom: float = 1.0
    """256/224 is the usual choice for ImageNet, 1 for small images."""

    def keeps(self, height: int, width: int) -> bool:
        """Whether images of this size are left unchanged."""
        return self.size is None or (self.zoom == 1 and height == width == self.size)

    def __call__(self, picture: Picture) -> Planes:
        if self.size is None or self.keeps(picture.height, picture.width):
            return picture.pixels(1).transpose(2, 0, 1)
        side = max(1, round(min(picture.height, picture.width) / self.zoom))
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        return resized(picture, (left, top, left + side, top + side), self.size)


def resized(picture: Picture, box: Box, size: int) -> Planes:
    """A box of the picture, resized to (C, size, size) bytes: bilinear, with antialiasing."""
    left, top, right, bottom = box
    # Decode at a smaller size if the box then still has `size` pixels.
    enough = max(1, min(right - left, bottom - top) // size)
    shrink = next(factor for factor in (8, 4, 2, 1) if factor <= enough)
    pixels = picture.pixels(shrink)
    if pixels.shape[0] < picture.height:
        left, top, right, bottom = left // shrink, top // shrink, -(-right // shrink), -(-bottom // shrink)
    # PyTorch is three times as fast as Pillow here, and agrees with it to one grey level, rarely two. A contiguous copy
    # is resized a third faster, copying included.
    part = torch.from_numpy(pixels[top:bottom, left:right].copy()).permute(2, 0, 1)
    planes: Planes = F.interpolate(part[None], (size, size), mode="bilinear", antialias=True)[0].numpy()
    return planes


@dataclass(frozen=True)
class Kept:
    """Images in memory, resized by `fit`, each from when it is first requested.

    Threads share it without a lock: if two decode the same image, they write the same bytes.
    """

    fit: Fit
    images: Planes
    there: NDArray[np.bool_]


def fitted(source: Source, indices: NDArray[np.int64], fit: Fit) -> Planes:
    """These images as evaluation sees them, (N, C, H, W), from memory or decoded now."""
    kept = source.kept
    if not isinstance(kept, Kept) or kept.fit != fit:
        return _decoded(source, indices, fit)
    missing = indices[~kept.there[indices]]
    if len(missing):
        kept.images[missing] = _decoded(source, missing, fit, kept.images.shape[1:])
        kept.there[missing] = True
    return kept.images[indices]


def _as_stored(source: Source, fit: Fit) -> bool:
    """Whether the images are arrays that are used without resizing."""
    return isinstance(source.pictures, Arrays) and fit.keeps(*source.pictures.images.shape[1:3])


def _decoded(source: Source, indices: NDArray[np.int64], fit: Fit, shape: tuple[int, ...] | None = None) -> Planes:
    if _as_stored(source, fit):
        return source.pictures.images[source.rows[indices]].transpose(0, 3, 1, 2)  # type: ignore[attr-defined, no-any-return]
    images: list[Planes] = []
    for index in indices.tolist():
        images.append(fit(source.picture(index)))
        shape = shape or images[0].shape
        if images[-1].shape != shape:
            raise ValueError(
                f"{source.name(index)} has shape {images[-1].shape}, and others have {shape}: set data.image_size to "
                "resize them all"
            )
    return np.stack(images)


def keep(data: DataSet, fit: Fit, train: bool = True, room: int = 1024 * _MIB) -> DataSet:
    """Keep the decoded images of a data set in memory, training images first, if they fit into `room` bytes.

    Training images only if training looks at what `fit` returns (`train`); `DataSet.notes` says so if they will be
    decoded again in every epoch. Arrays that are used without resizing are in memory already.
    """
    notes = data.notes
    parts = {"train": copy.copy(data.train), "test": copy.copy(data.test)}
    for part, source in parts.items():
        if (part == "train" and not train) or _as_stored(source, fit):
            continue
        shape = fit(source.picture(0)).shape
        size = len(source) * int(np.prod(shape))
        if size <= min(room, free_memory() // 2):
            images = np.empty((len(source), *shape), np.uint8)
            source.kept, room = Kept(fit, images, np.zeros(len(source), np.bool_)), room - size
        elif part == "train":
            needed = f"{size / _MIB:,.0f} MiB, more than the {room // _MIB:,} MiB for them"
            notes += (f"train images are decoded in every epoch: they take {needed}",)
    return replace(data, train=parts["train"], test=parts["test"], notes=notes)
