"""The operations of AutoAugment and RandAugment on a grey or RGB image, by a share of their greatest strength."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

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


def on_planes(planes: Planes, change: Callable[[Image.Image], Image.Image]) -> Planes:
    """A change of one (C, H, W) image, C being 1 or 3, by way of Pillow."""
    image = Image.fromarray(planes[0]) if len(planes) == 1 else Image.fromarray(planes.transpose(1, 2, 0).copy())
    pixels = np.asarray(change(image))
    return pixels[None] if len(planes) == 1 else pixels.transpose(2, 0, 1)


def own_copy(images: Planes, name: str) -> Planes:
    """The images (N, C, H, W) to be changed in place; other numbers of channels than 1 and 3 are refused."""
    if images.shape[1] not in (1, 3):
        raise ValueError(f"{name} of images with {images.shape[1]} channels: it is for grey or RGB")
    own = np.ascontiguousarray(images)
    return own.copy() if own is images else own


def operate(image: Image.Image, name: str, share: float, sign: int, fill: int) -> Image.Image:
    """One operation.

    Args:
        image: Grey or RGB.
        name: Of the operation, as it was published.
        share: Of the greatest strength, 0 to 1.
        sign: The direction, 1 or -1, where there are two.
        fill: Grey level of the area that is uncovered.
    """
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
