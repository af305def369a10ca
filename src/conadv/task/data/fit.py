"""Resize images to one size: the centre for evaluation, and any box for training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_SIDE, check_memory
from conadv.task.data.source import Arrays, Picture, Planes, Source

Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""


def check_side(size: int | None) -> None:
    """Raise a ValueError if images cannot be resized to this height and width."""
    if size is not None and not 1 <= size <= MAX_SIDE:
        raise ValueError(f"size {size}: choose 1 to {MAX_SIDE:,} pixels")


def check_chunk(count: int, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if a chunk of images would not fit into memory."""
    height, width = shape[-2:]
    what = f"{count} images of {width} × {height} pixels at a time"
    check_memory(count * math.prod(shape), what, "lower the chunk size, or set a smaller data.image_size")


@dataclass(frozen=True)
class Fit:
    """Resize the shorter side to `size` × `zoom`, then crop the centre: what evaluation sees."""

    size: int | None = None
    """Height and width of the result; None leaves images as they are."""
    zoom: float = 1.0
    """256/224 is the usual choice for ImageNet, 1 for small images."""

    def __post_init__(self) -> None:
        check_side(self.size)

    def keeps(self, height: int, width: int) -> bool:
        """Whether images of this size are left unchanged."""
        return self.size is None or (self.zoom == 1 and height == width == self.size)

    def __call__(self, picture: Picture) -> Planes:
        if self.size is None or self.keeps(picture.height, picture.width):
            return picture.pixels().transpose(2, 0, 1)
        side = max(1, round(min(picture.height, picture.width) / self.zoom))
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        return resized(picture, (left, top, left + side, top + side), self.size)


def decoded(source: Source, indices: NDArray[np.int64], fit: Fit) -> Planes:
    """These images as evaluation sees them, decoded: (N, C, H, W)."""
    if isinstance(source, Arrays) and fit.keeps(*source.images.shape[1:3]):
        return source.images[indices].transpose(0, 3, 1, 2)
    images: list[Planes] = []
    for index in indices.tolist():
        images.append(fit(source.picture(index)))
        if len(images) == 1:
            check_chunk(len(indices), images[0].shape)
        if images[-1].shape != images[0].shape:
            raise ValueError(
                f"{source.name(index)} has shape {images[-1].shape} and {source.name(int(indices[0]))} "
                f"{images[0].shape}: set data.image_size to resize them all"
            )
    return np.stack(images)


def resized(picture: Picture, box: Box, size: int) -> Planes:
    """A box of the picture, resized to (C, size, size) bytes: bilinear, with antialiasing."""
    left, top, right, bottom = box
    # Decode at a smaller size if the box then still has `size` pixels.
    enough = max(1, min(right - left, bottom - top) // size)
    shrink = next(factor for factor in (8, 4, 2, 1) if factor <= enough)
    pixels = picture.pixels(shrink)
    if pixels.shape[0] < picture.height:
        left, top, right, bottom = left // shrink, top // shrink, -(-right // shrink), -(-bottom // shrink)
    # PyTorch is three times as fast as Pillow here, and agrees with it to one grey level. A contiguous copy is resized
    # a third faster, copying included.
    part = torch.from_numpy(pixels[top:bottom, left:right].copy()).permute(2, 0, 1)
    planes: Planes = F.interpolate(part[None], (size, size), mode="bilinear", antialias=True)[0].numpy()
    return planes
