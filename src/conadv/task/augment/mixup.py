"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): images of a chunk, and their labels, mixed in pairs.

Each image is mixed with the one before it in its chunk, whose order is random. One share per chunk is drawn from
Beta(alpha, alpha), as a function of a seed: nothing depends on other chunks or on the rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.fit import Box
from conadv.task.data.source import Labels, Planes
from conadv.task.draws import Seeds, mix_all, uniforms

SoftLabels = NDArray[np.float32]
"""Shares of the classes that sum to 1, (N, classes)."""

# Separate streams of random numbers.
_WHICH, _SHARE, _BOX = 1, 2, 3
_DRAWS = 64  # for one gamma variate; they are too few with a probability below 1e-25


@dataclass(frozen=True)
class Mix:
    """Mixup or CutMix; if both are on, each chunk gets one of them, with equal probability."""

    mixup: float = 0.0
    """Alpha of mixup; 0: off."""
    cutmix: float = 0.0
    """Alpha of CutMix; 0: off."""

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0 or max(self.mixup, self.cutmix) == 0:
            raise ValueError(f"mixup {self.mixup} and cutmix {self.cutmix}: choose alphas of 0 or more, not both 0")

    def __call__(
        self, views: tuple[Planes, ...], labels: Labels, classes: int, seed: Seeds
    ) -> tuple[tuple[Planes, ...], SoftLabels]:
        """Mix a chunk.

        Args:
            views: The images, each view (N, C, H, W); all views are mixed alike.
            labels: Class numbers, (N,).
            classes: How many classes there are.
            seed: One seed for everything random.

        Returns:
            The mixed views, and the labels as shares of the classes, (N, classes).
        """
        cut = self.cutmix > 0 and (self.mixup == 0 or bool(uniforms(mix_all(seed, _WHICH), 1)[0, 0] < 0.5))
        share = beta(self.cutmix if cut else self.mixup, mix_all(seed, _SHARE))
        if not cut:
            return tuple(mixup(view, share) for view in views), soft_labels(labels, classes, share)
        height, width = views[0].shape[2:]
        box = cut_box(height, width, share, uniforms(mix_all(seed, _BOX), 2)[0])
        left, top, right, bottom = box
        kept = 1 - (right - left) * (bottom - top) / (height * width)
        return tuple(cutmix(view, box) for view in views), soft_labels(labels, classes, kept)


def mixup(images: Planes, share: float) -> Planes:
    """`share` of each image and the rest of the one before it, rounded to whole bytes; (N, C, H, W)."""
    own = images.astype(np.float32)
    mixed = np.float32(share) * own + np.float32(1 - share) * np.roll(own, 1, axis=0)
    return np.rint(mixed).astype(np.uint8)


def cutmix(images: Planes, box: Box) -> Planes:
    """Each image with the box of the one before it; (N, C, H, W)."""
    left, top, right, bottom = box
    mixed = images.copy()
    mixed[:, :, top:bottom, left:right] = np.roll(images, 1, axis=0)[:, :, top:bottom, left:right]
    return mixed


def cut_box(height: int, width: int, share: float, draws: NDArray[np.float64]) -> Box:
    """A box of 1 - `share` of the area around a random pixel, clipped to the image."""
    half = 0.5 * math.sqrt(1 - share)
    x, y, half_width, half_height = int(draws[0] * width), int(draws[1] * height), int(half * width), int(half * height)
    return max(0, x - half_width), max(0, y - half_height), min(width, x + half_width), min(height, y + half_height)


def soft_labels(labels: Labels, classes: int, share: float) -> SoftLabels:
    """`share` of each label and the rest of the one before it."""
    own = np.zeros((len(labels), classes), np.float32)
    own[np.arange(len(labels)), labels] = 1
    return np.float32(share) * own + np.float32(1 - share) * np.roll(own, 1, axis=0)


def beta(alpha: float, seed: Seeds) -> float:
    """A number in [0, 1] from Beta(alpha, alpha), as a function of a seed alone."""
    first, second = (_log_gamma_variate(alpha, uniforms(mix_all(seed, side), _DRAWS)[0]) for side in (0, 1))
    return 1 / (1 + math.exp(min(700.0, second - first)))


def _log_gamma_variate(alpha: float, draws: NDArray[np.float64]) -> float:
    """The logarithm of a number from Gamma(alpha), by Marsaglia and Tsang (2000), which has no underflow."""
    last, *rest = (1 - draws).tolist()  # in (0, 1]
    d = alpha + 1 - 1 / 3
    c = 1 / math.sqrt(9 * d)
    for radius, angle, chance in zip(rest[0::3], rest[1::3], rest[2::3], strict=True):
        normal = math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)
        cube = (1 + c * normal) ** 3
        if cube > 0 and math.log(chance) < 0.5 * normal**2 + d * (1 - cube + math.log(cube)):
            return math.log(d * cube) + math.log(last) / alpha
    raise AssertionError("no draw was accepted")
