"""AutoAugment: one of 25 pairs of operations an image, each applied with its own probability.

Levels 0 to 9 divide the published ranges evenly, a higher level being the stronger change, and the direction is drawn
where there are two: the reading of the usual libraries. (The authors' own code divides by 10 and differs in Posterize,
Solarize and the enhancements, and between its two versions.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from conadv.task.augment.policies import SubPolicy
from conadv.task.data.draws import Seeds, uniforms
from conadv.task.data.source import Planes

_ENHANCERS = {
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Brightness": ImageEnhance.Brightness,
    "Sharpness": ImageEnhance.Sharpness,
}
_WITHOUT_STRENGTH: dict[str, Callable[[Image.Image], Image.Image]] = {
    "AutoContrast": ImageOps.autocontrast,
    "Equalize": ImageOps.equalize,
    "Invert": ImageOps.invert,
}


@dataclass(frozen=True)
class AutoAugment:
    """A policy, and the grey level of the area that a turned or moved image uncovers."""

    policy: tuple[SubPolicy, ...]
    fill: int

    def __call__(self, images: Planes, seeds: Seeds) -> Planes:
        """(N, C, H, W) to the same shape, C being 1 or 3."""
        if images.shape[1] not in (1, 3):
            raise ValueError(f"AutoAugment of images with {images.shape[1]} channels: it is for grey or RGB")
        augmented = np.ascontiguousarray(images)
        augmented = augmented.copy() if augmented is images else augmented
        # A column each: the sub-policy; then for both operations whether, and in which direction.
        for place, (which, *draws) in enumerate(uniforms(seeds, 5).tolist()):
            pair = self.policy[int(which * len(self.policy))]
            chances, signs = draws[0::2], [1 if draw < 0.5 else -1 for draw in draws[1::2]]
            wanted = [
                (name, level, sign)
                for (name, probability, level), chance, sign in zip(pair, chances, signs, strict=True)
                if chance < probability
            ]
            if wanted:
                augmented[place] = self._apply(augmented[place], wanted)
        return augmented

    def _apply(self, planes: Planes, wanted: list[tuple[str, int, int]]) -> Planes:
        image = Image.fromarray(planes[0]) if len(planes) == 1 else Image.fromarray(planes.transpose(1, 2, 0).copy())
        for name, level, sign in wanted:
            image = operate(image, name, level, sign, self.fill)
        pixels = np.asarray(image)
        return pixels[None] if len(planes) == 1 else pixels.transpose(2, 0, 1)


def operate(image: Image.Image, name: str, level: int, sign: int, fill: int) -> Image.Image:
    """One operation on a grey or RGB image; `sign` is 1 or -1."""
    share = level / 9
    if name in _WITHOUT_STRENGTH:
        return _WITHOUT_STRENGTH[name](image)
    if name in _ENHANCERS:
        return _ENHANCERS[name](image).enhance(1 + sign * 0.9 * share)
    match name:
        case "ShearX":
            return _affine(image, (1, sign * 0.3 * share, 0, 0, 1, 0), fill)
        case "ShearY":
            return _affine(image, (1, 0, 0, sign * 0.3 * share, 1, 0), fill)
        case "TranslateX":  # up to 150 pixels of the 331 that the images of the search had
            return _affine(image, (1, 0, sign * int(150 / 331 * image.width * share), 0, 1, 0), fill)
        case "TranslateY":
            return _affine(image, (1, 0, 0, 0, 1, sign * int(150 / 331 * image.height * share)), fill)
        case "Rotate":
            return image.rotate(sign * 30 * share, fillcolor=_colour(image, fill))
        case "Posterize":
            return ImageOps.posterize(image, 8 - round(4 * share))
        case "Solarize":
            return ImageOps.solarize(image, math.ceil(256 - 256 * share))
    raise AssertionError(name)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: int) -> Image.Image:
    """The matrix takes a place in the result to one in the image."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=_colour(image, fill)
    )


def _colour(image: Image.Image, fill: int) -> int | tuple[int, int, int]:
    return fill if image.mode == "L" else (fill, fill, fill)
