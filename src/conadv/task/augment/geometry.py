"""Where to look in an image: random crops for training, the centre for evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from conadv.task.data.draws import Seeds, uniforms
from conadv.task.data.source import Picture, Pixels

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


@dataclass(frozen=True)
class Fit:
    """Resize the shorter side to `size` × `zoom`, then cut the centre out: what evaluation looks at."""

    size: int | None = None
    """Height and width of the result; None leaves images as they are."""
    zoom: float = 1.0
    """256/224 is the usual choice for ImageNet, 1 for small images."""

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size {self.size}: choose 1 pixel or more")

    def keeps(self, height: int, width: int) -> bool:
        """Whether images of this size stay as they are."""
        return self.size is None or (self.zoom == 1 and height == width == self.size)

    def __call__(self, picture: Picture) -> Pixels:
        if self.size is None or self.keeps(picture.height, picture.width):
            return picture.pixels()
        side = min(picture.height, picture.width) / self.zoom
        left, top = (picture.width - side) / 2, (picture.height - side) / 2
        return resized(picture, (left, top, left + side, top + side), self.size)


@dataclass(frozen=True)
class Shift:
    """Random crop of the image padded by an eighth of its side (4 black pixels at 32), random flip."""

    flip: bool = True

    def __call__(self, images: Pixels, seeds: Seeds) -> Pixels:
        """(N, H, W, C) to the same shape."""
        count, height, width, _ = images.shape
        pad_y, pad_x = height // 8, width // 8
        draws = uniforms(seeds, 3)
        rows = _offsets(draws[:, 0], pad_y) + np.arange(height)
        columns = _offsets(draws[:, 1], pad_x) + np.arange(width)
        if self.flip:
            columns = np.where(draws[:, 2:3] < 0.5, columns[:, ::-1], columns)
        padded = np.pad(images, ((0, 0), (pad_y, pad_y), (pad_x, pad_x), (0, 0)))
        chosen: Pixels = padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
        return chosen


@dataclass(frozen=True)
class ResizedCrop:
    """Random crop of 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3, resized, and a random flip."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size {self.size}: choose 1 pixel or more")

    def __call__(self, picture: Picture, draws: NDArray[np.float64]) -> Pixels:
        """One image; `draws` are its `DRAWS` random numbers."""
        pixels = resized(picture, random_box(picture.height, picture.width, draws[1:]), self.size)
        return pixels[:, ::-1] if draws[0] < 0.5 else pixels


_ATTEMPTS = 10
DRAWS = 1 + 4 * _ATTEMPTS


def random_box(height: int, width: int, draws: NDArray[np.float64]) -> Box:
    """The first of ten drawn boxes that fits, else the largest in the centre whose ratio is allowed."""
    for area, ratio, across, down in draws.reshape(_ATTEMPTS, 4).tolist():
        pixels = height * width * (0.08 + 0.92 * area)
        aspect = math.exp((2 * ratio - 1) * math.log(4 / 3))
        box_width, box_height = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    margin_x = max(0.0, width - height * 4 / 3) / 2
    margin_y = max(0.0, height - width * 4 / 3) / 2
    return margin_x, margin_y, width - margin_x, height - margin_y


def resized(picture: Picture, box: Box, size: int) -> Pixels:
    """The box of the picture as (size, size, C) bytes, bilinear with support for shrinking (Pillow's)."""
    left, top, right, bottom = box
    # Decode no finer than needed: at half the size, say, where half of the box still has `size` pixels.
    enough = min(right - left, bottom - top) / size
    pixels = picture.pixels(shrink=next(factor for factor in (8, 4, 2, 1) if factor <= max(enough, 1)))
    across, down = pixels.shape[1] / picture.width, pixels.shape[0] / picture.height
    box = (left * across, top * down, right * across, bottom * down)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    small = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return small.reshape(size, size, pixels.shape[2])


def _offsets(draws: NDArray[np.float64], padding: int) -> NDArray[np.int64]:
    return (draws * (2 * padding + 1)).astype(np.int64)[:, None]
