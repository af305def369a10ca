"""Random crops and flips for training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.fit import Box, check_side, resized
from conadv.task.data.source import Picture, Planes
from conadv.task.draws import Seeds, uniforms


@dataclass(frozen=True)
class Shift:
    """Pad by an eighth of the side (4 black pixels at 32), crop at random, flip at random."""

    flip: bool = True

    def __call__(self, images: Planes, seeds: Seeds) -> Planes:
        """Augment images of shape (N, C, H, W)."""
        count, channels, height, width = images.shape
        pad_y, pad_x = height // 8, width // 8
        padded = np.zeros((count, channels, height + 2 * pad_y, width + 2 * pad_x), np.uint8)
        padded[:, :, pad_y : pad_y + height, pad_x : pad_x + width] = images
        draws = uniforms(seeds, 3)
        tops = (draws[:, 0] * (2 * pad_y + 1)).astype(int)
        lefts = (draws[:, 1] * (2 * pad_x + 1)).astype(int)
        flips = (draws[:, 2] < 0.5) & self.flip
        # A view of all windows (N, C, tops, lefts, H, W), from which one copy takes one window per image.
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        shifted: Planes = windows[np.arange(count), :, tops, lefts]
        shifted[flips] = shifted[flips][..., ::-1]
        return shifted


@dataclass(frozen=True)
class ResizedCrop:
    """Random crop of 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3, resized, random flip."""

    size: int

    def __post_init__(self) -> None:
        check_side(self.size)

    def __call__(self, picture: Picture, draws: NDArray[np.float64]) -> Planes:
        """Augment one image; `draws` are its `DRAWS` random numbers."""
        planes = resized(picture, random_box(picture.height, picture.width, draws[1:]), self.size)
        return planes[..., ::-1] if draws[0] < 0.5 else planes


_ATTEMPTS = 10
DRAWS = 1 + 4 * _ATTEMPTS


def random_box(height: int, width: int, draws: NDArray[np.float64]) -> Box:
    """The first of ten random boxes that fits, or else the largest central box with an allowed aspect ratio."""
    for area, ratio, across, down in draws.reshape(_ATTEMPTS, 4).tolist():
        pixels = height * width * (0.08 + 0.92 * area)
        aspect = math.exp((2 * ratio - 1) * math.log(4 / 3))
        box_width, box_height = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(across * (width - box_width + 1)), int(down * (height - box_height + 1))
            return left, top, left + box_width, top + box_height
    box_width, box_height = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height
