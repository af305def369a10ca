"""RandAugment (Cubuk et al. 2020): a few random operations out of 14, all of the same strength.

The operations and ranges are those of torchvision's `RandAugment` with its defaults: two operations, magnitude 9 of the
31 that divide each range evenly, a random direction if there are two, nearest-neighbour sampling, and black where the
image is moved away.
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image, ImageOps

from conadv.task.augment.operations import on_planes, operate, own_copy
from conadv.task.data.draws import Seeds, uniforms
from conadv.task.data.source import Planes

OPERATIONS = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
_LAST = 30  # the strongest of 31 magnitudes


@dataclass(frozen=True)
class RandAugment:
    """Apply `operations` random operations, each at `magnitude`, from 0 to 30."""

    operations: int = 2
    magnitude: int = 9
    fill: int = 0
    """Grey level of uncovered areas."""

    def __call__(self, images: Planes, seeds: Seeds) -> Planes:
        """Augment images of shape (N, C, H, W), with 1 or 3 channels."""
        augmented = own_copy(images, "RandAugment")
        # Two columns per operation: which one, and its direction.
        for place, draws in enumerate(uniforms(seeds, 2 * self.operations).tolist()):
            names = [OPERATIONS[int(draw * len(OPERATIONS))] for draw in draws[0::2]]
            signs = [1 if draw < 0.5 else -1 for draw in draws[1::2]]
            if any(name != "Identity" for name in names):
                augmented[place] = self._apply(augmented[place], names, signs)
        return augmented

    def _apply(self, planes: Planes, names: list[str], signs: list[int]) -> Planes:
        def change(image: Image.Image) -> Image.Image:
            for name, sign in zip(names, signs, strict=True):
                image = self._operate(image, name, sign)
            return image

        return on_planes(planes, change)

    def _operate(self, image: Image.Image, name: str, sign: int) -> Image.Image:
        share = self.magnitude / _LAST
        if name == "Identity":
            return image
        if name == "Solarize":  # the range of thresholds ends at 255 here, at 256 in AutoAugment
            return ImageOps.solarize(image, 255 - 255 * share)  # type: ignore[arg-type]  # it only compares
        return operate(image, name, share, sign, self.fill)
