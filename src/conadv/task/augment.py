"""Augmentation of training images, each image as a function of its own seed.

stored image ──► crop and flip ──► AutoAugment (autoaugment.py), for some ──► what training sees
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conadv.task.autoaugment import CIFAR10, IMAGENET, AutoAugment
from conadv.task.data.fit import Box, Fit, fitted, resized
from conadv.task.data.source import Picture, Planes, Source
from conadv.task.draws import Seeds, mix_all, uniforms

# Separate streams of random numbers.
_GEOMETRY, _POLICY = 1, 2


@dataclass(frozen=True)
class Augmentation:
    """From a stored image to what training sees."""

    crop: Literal["none", "shift", "shift and flip", "resized"] = "none"
    """What is cut out first, at random: see `shifted` and `random_crop`."""
    fit: Fit = field(default_factory=Fit)
    """What evaluation sees, and what is shifted."""
    policy: AutoAugment | None = None
    """Applied after the crop."""
    three_views: bool = False
    """Also return the images without the last stage: (clean, augmented). The third view is the adversarial one."""

    def __call__(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> tuple[Planes, ...]:
        """The views of these images, each (N, C, H, W)."""
        augmented = self._cropped(source, indices, mix_all(seeds, _GEOMETRY))
        if self.policy is not None:
            clean, augmented = augmented, self.policy(augmented, mix_all(seeds, _POLICY))
        elif self.three_views:
            clean = fitted(source, indices, self.fit)
        return (clean, augmented) if self.three_views else (augmented,)

    @property
    def looks_at_fit(self) -> bool:
        """Whether training starts from the images as evaluation sees them, which are the same in every epoch."""
        return self.crop != "resized"

    def shape(self, source: Source) -> tuple[int, int, int]:
        """Channels, height and width of this source's images as training sees them."""
        channels, height, width = self(source, np.zeros(1, np.int64), np.zeros(1, np.uint64))[0].shape[1:]
        return channels, height, width

    def _cropped(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> Planes:
        if self.crop == "resized":
            assert self.fit.size is not None
            rows = zip(indices.tolist(), uniforms(seeds, DRAWS), strict=True)
            return np.stack([random_crop(source.picture(index), self.fit.size, draws) for index, draws in rows])
        images = fitted(source, indices, self.fit)
        return images if self.crop == "none" else shifted(images, seeds, flip=self.crop == "shift and flip")


_CENTRE = Fit(224, zoom=256 / 224)
AUGMENTATIONS = {
    "none": Augmentation(),
    "crop": Augmentation("shift"),
    "crop-flip": Augmentation("shift and flip"),
    "resized-crop": Augmentation("resized", _CENTRE),
    # Areas that an operation uncovers are black for CIFAR and grey for ImageNet, as in the authors' code.
    "autoaugment-cifar10": Augmentation("shift and flip", policy=AutoAugment(CIFAR10, fill=0)),
    "autoaugment-imagenet": Augmentation("resized", _CENTRE, AutoAugment(IMAGENET, fill=128)),
}


def augmentation(name: str, size: int | None = None, three_views: bool = False) -> Augmentation:
    """The augmentation called `name`, for images of `size` × `size` pixels (None: the size of the data, or 224)."""
    chosen = AUGMENTATIONS[name]
    fit = chosen.fit if size is None else replace(chosen.fit, size=size)
    return replace(chosen, fit=fit, three_views=three_views)


def shifted(images: Planes, seeds: Seeds, flip: bool) -> Planes:
    """Pad images (N, C, H, W) by an eighth of the side (4 black pixels at 32), crop at random, flip at random."""
    count, channels, height, width = images.shape
    pad_y, pad_x = height // 8, width // 8
    padded = np.zeros((count, channels, height + 2 * pad_y, width + 2 * pad_x), np.uint8)
    padded[:, :, pad_y : pad_y + height, pad_x : pad_x + width] = images
    draws = uniforms(seeds, 3)
    tops = (draws[:, 0] * (2 * pad_y + 1)).astype(int)
    lefts = (draws[:, 1] * (2 * pad_x + 1)).astype(int)
    flips = (draws[:, 2] < 0.5) & flip
    # A view of all windows (N, C, tops, lefts, H, W), from which one copy takes one window per image.
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    crops: Planes = windows[np.arange(count), :, tops, lefts]
    crops[flips] = crops[flips][..., ::-1]
    return crops


_ATTEMPTS = 10
DRAWS = 1 + 4 * _ATTEMPTS


def random_crop(picture: Picture, size: int, draws: NDArray[np.float64]) -> Planes:
    """Crop 8 to 100 % of the area with an aspect ratio of 3/4 to 4/3, resize it, flip it at random; takes `DRAWS`."""
    planes = resized(picture, random_box(picture.height, picture.width, draws[1:]), size)
    return planes[..., ::-1] if draws[0] < 0.5 else planes


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
