"""AutoAugment (Cubuk et al. 2019): for each image one of 25 pairs of operations, each with its own probability.

As in the usual libraries, levels 0 to 9 divide the published ranges evenly, from weak to strong, and operations with
two directions take a random one. (The authors' code divides by 10, and differs in Posterize, Solarize and the
enhancements, and between its two versions.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from conadv.task.data.source import Planes
from conadv.task.draws import Seeds, uniforms

Operation = tuple[str, float, int]
"""Name, probability, and level from 0 to 9, which AutoContrast, Equalize and Invert make no use of."""
SubPolicy = tuple[Operation, Operation]


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
        for planes, draws in zip(own, uniforms(seeds, 5).tolist(), strict=True):
            if chosen := self._choose(draws):
                grey = len(planes) == 1
                image = Image.fromarray(planes[0] if grey else planes.transpose(1, 2, 0).copy())
                for name, share, sign in chosen:
                    image = operate(image, name, share, sign, self.fill)
                pixels = np.asarray(image)
                planes[:] = pixels[None] if grey else pixels.transpose(2, 0, 1)
        return own

    def _choose(self, draws: list[float]) -> list[tuple[str, float, int]]:
        """Operations with their share of the maximal strength and their direction, 1 or -1.

        Draws: the sub-policy, then for each of its two operations whether to apply it, and the direction.
        """
        pair = self.policy[int(draws[0] * len(self.policy))]
        chances, signs = draws[1::2], draws[2::2]
        return [
            (name, level / 9, 1 if sign < 0.5 else -1)
            for (name, probability, level), chance, sign in zip(pair, chances, signs, strict=True)
            if chance < probability
        ]


def operate(image: Image.Image, name: str, share: float, sign: int, fill: int) -> Image.Image:
    """Apply the operation of this published name to a grey or RGB image, at a share (0 to 1) of its maximal strength.

    `sign`, 1 or -1, is its direction, if it has two. `fill` is the grey level of areas that it uncovers.
    """
    match name:
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            enhanced: Image.Image = getattr(ImageEnhance, name)(image).enhance(1 + sign * 0.9 * share)
            return enhanced
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Invert":
            return ImageOps.invert(image)
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
            return ImageOps.posterize(image, 8 - round(4 * share))
        case "Solarize":
            return ImageOps.solarize(image, 256 - 256 * share)  # type: ignore[arg-type]  # a fraction is fine
    raise AssertionError(name)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: int) -> Image.Image:
    """The matrix maps a pixel of the result to one of the image."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=_colour(image, fill)
    )


def _colour(image: Image.Image, fill: int) -> int | tuple[int, int, int]:
    return fill if image.mode == "L" else (fill, fill, fill)


# The policies that were found (Cubuk et al. 2019, appendix), one sub-policy per line.
IMAGENET: tuple[SubPolicy, ...] = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 5)),
    (("Equalize", 0.8, 8), ("Equalize", 0.6, 3)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 7), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 4), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 7)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 2)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 8), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 2)),
    (("Equalize", 0.0, 7), ("Equalize", 0.8, 8)),
    (("Invert", 0.6, 4), ("Equalize", 1.0, 8)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 8)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 9)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 3)),
    (("Equalize", 0.4, 7), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 5)),
    (("Invert", 0.6, 4), ("Equalize", 1.0, 8)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 8), ("Equalize", 0.6, 3)),
)

CIFAR10: tuple[SubPolicy, ...] = (
    (("Invert", 0.1, 7), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 8), ("Equalize", 0.9, 2)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, 5), ("Equalize", 0.5, 1)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, 7), ("AutoContrast", 0.4, 8)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 3)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 8), ("Equalize", 0.6, 4)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 6)),
    (("AutoContrast", 0.8, 4), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 3)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 2), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, 8), ("Invert", 0.1, 3)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 1)),
)
