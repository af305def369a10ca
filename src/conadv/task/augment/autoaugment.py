"""AutoAugment: some operations per image, drawn from its seed, on grey or RGB images.

AutoAugment (Cubuk et al. 2019) takes one of 25 pairs (policies.py), each operation with its own probability. As in the
usual libraries, levels 0 to 9 divide the published ranges evenly, from weak to strong, and operations with two
directions take a random one. (The authors' code divides by 10, and differs in Posterize, Solarize and the enhancements,
and between its two versions.)

Operations that map each value to another are written in NumPy, with Pillow's results to the bit: Pillow builds its
tables of 256 values in Python, which takes longer than the rest for small images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from conadv.task.augment.policies import SubPolicy
from conadv.task.data.source import Pixels, Planes
from conadv.task.draws import Seeds, uniforms

_ENHANCERS = {
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Brightness": ImageEnhance.Brightness,
    "Sharpness": ImageEnhance.Sharpness,
}
# The name of an operation, its strength as a fraction of the maximum, and its direction, 1 or -1.
Chosen = tuple[str, float, int]


@dataclass(frozen=True)
class AutoAugment:
    """A policy, and the grey level of areas that a rotation or translation uncovers."""

    policy: tuple[SubPolicy, ...]
    fill: int

    def __call__(self, images: Planes, seeds: Seeds) -> Planes:
        """Augment images of shape (N, C, H, W), with 1 or 3 channels."""
        if images.shape[1] not in (1, 3):
            raise ValueError(f"images with {images.shape[1]} channels cannot be augmented: convert them to 1 or 3")
        own = np.ascontiguousarray(images)
        own = own.copy() if own is images else own
        for place, row in enumerate(uniforms(seeds, 5).tolist()):
            if chosen := self._choose(row):
                grey, planes = len(own[place]) == 1, own[place]
                image = Image.fromarray(planes[0] if grey else planes.transpose(1, 2, 0).copy())
                for name, share, sign in chosen:
                    image = operate(image, name, share, sign, self.fill)
                pixels = np.asarray(image)
                own[place] = pixels[None] if grey else pixels.transpose(2, 0, 1)
        return own

    def _choose(self, draws: list[float]) -> list[Chosen]:
        """Draws: the sub-policy, then for each of its two operations whether to apply it, and the direction."""
        pair = self.policy[int(draws[0] * len(self.policy))]
        chances, signs = draws[1::2], draws[2::2]
        return [
            (name, level / 9, 1 if sign < 0.5 else -1)
            for (name, probability, level), chance, sign in zip(pair, chances, signs, strict=True)
            if chance < probability
        ]


def operate(image: Image.Image, name: str, share: float, sign: int, fill: int) -> Image.Image:
    """Apply one operation.

    Args:
        image: Grey or RGB.
        name: Published name of the operation.
        share: Strength as a fraction of the maximum, 0 to 1.
        sign: Direction, 1 or -1; ignored if the operation has only one.
        fill: Grey level of uncovered areas.
    """
    if name in _ENHANCERS:
        return _ENHANCERS[name](image).enhance(1 + sign * 0.9 * share)
    match name:
        case "AutoContrast":
            return _on_pixels(image, _stretch)
        case "Equalize":  # by histogram steps of a 255th of the pixels: nothing to do if there are fewer
            return ImageOps.equalize(image) if image.width * image.height > 255 else image
        case "Invert":
            return _on_pixels(image, np.invert)
        case "ShearX":
            return _affine(image, (1, sign * 0.3 * share, 0, 0, 1, 0), fill)
        case "ShearY":
            return _affine(image, (1, 0, 0, sign * 0.3 * share, 1, 0), fill)
        case "TranslateX":  # up to 150 of 331 pixels, the image size of the published search
            return _affine(image, (1, 0, sign * int(150 / 331 * image.width * share), 0, 1, 0), fill)
        case "TranslateY":
            return _affine(image, (1, 0, 0, 0, 1, sign * int(150 / 331 * image.height * share)), fill)
        case "Rotate":
            return image.rotate(sign * 30 * share, fillcolor=_colour(image, fill))
        case "Posterize":
            kept = np.uint8(256 - 2 ** round(4 * share))
            return _on_pixels(image, lambda pixels: pixels & kept)
        case "Solarize":
            threshold = math.ceil(256 - 256 * share)
            return _on_pixels(image, lambda pixels: np.where(pixels < threshold, pixels, 255 - pixels))
    raise AssertionError(name)


def _on_pixels(image: Image.Image, change: Callable[[Pixels], Pixels]) -> Image.Image:
    return Image.fromarray(change(np.asarray(image)))


def _stretch(pixels: Pixels) -> Pixels:
    """Stretch the values of each channel to 0 to 255, except for a channel with a single value."""
    low, high = pixels.min((0, 1)), pixels.max((0, 1))
    scale = 255.0 / np.maximum(high - low, 1)
    stretched = pixels * scale - low * scale
    return np.where(low == high, pixels, stretched.clip(0, 255)).astype(np.uint8)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: int) -> Image.Image:
    """The matrix maps a pixel of the result to one of the image."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=_colour(image, fill)
    )


def _colour(image: Image.Image, fill: int) -> int | tuple[int, int, int]:
    return fill if image.mode == "L" else (fill, fill, fill)
