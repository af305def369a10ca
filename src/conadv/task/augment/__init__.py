"""Augmentation of training images, each image as a function of its own seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from conadv.task.augment.autoaugment import AutoAugment
from conadv.task.augment.geometry import DRAWS, ResizedCrop, Shift
from conadv.task.augment.policies import CIFAR10, IMAGENET
from conadv.task.data.fit import Fit, fitted
from conadv.task.data.source import Planes, Source
from conadv.task.draws import Seeds, mix_all, uniforms

__all__ = ["AUGMENTATIONS", "Augmentation", "augmentation"]

# Separate streams of random numbers.
_GEOMETRY, _POLICY = 1, 2


@dataclass(frozen=True)
class Augmentation:
    """From a stored image to what training sees."""

    crop: Shift | ResizedCrop | None = None
    fit: Fit = field(default_factory=Fit)
    """What evaluation sees, and the input of `Shift`."""
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
        return not isinstance(self.crop, ResizedCrop)

    def shape(self, source: Source) -> tuple[int, int, int]:
        """Channels, height and width of this source's images as training sees them."""
        channels, height, width = self(source, np.zeros(1, np.int64), np.zeros(1, np.uint64))[0].shape[1:]
        return channels, height, width

    def _cropped(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> Planes:
        match self.crop:
            case None:
                return fitted(source, indices, self.fit)
            case Shift() as shift:
                return shift(fitted(source, indices, self.fit), seeds)
            case ResizedCrop() as crop:
                draws = uniforms(seeds, DRAWS)
                pictures = (source.picture(index) for index in indices.tolist())
                return np.stack([crop(picture, row) for picture, row in zip(pictures, draws, strict=True)])


_CENTRE = Fit(224, zoom=256 / 224)
AUGMENTATIONS = {
    "none": Augmentation(),
    "crop": Augmentation(Shift(flip=False)),
    "crop-flip": Augmentation(Shift()),
    "resized-crop": Augmentation(ResizedCrop(224), _CENTRE),
    # Areas that an operation uncovers are black for CIFAR and grey for ImageNet, as in the authors' code.
    "autoaugment-cifar10": Augmentation(Shift(), policy=AutoAugment(CIFAR10, fill=0)),
    "autoaugment-imagenet": Augmentation(ResizedCrop(224), _CENTRE, AutoAugment(IMAGENET, fill=128)),
}


def augmentation(name: str, size: int | None = None, three_views: bool = False) -> Augmentation:
    """The augmentation called `name`, for images of `size` × `size` pixels (None: the size of the data, or 224)."""
    if name not in AUGMENTATIONS:
        raise ValueError(f"augmentation {name!r}: choose one of {', '.join(AUGMENTATIONS)}")
    if three_views and name == "none":
        raise ValueError("three views need an augmentation: choose one other than none")
    chosen = replace(AUGMENTATIONS[name], three_views=three_views)
    if size is None:
        return chosen
    crop = ResizedCrop(size) if isinstance(chosen.crop, ResizedCrop) else chosen.crop
    return replace(chosen, crop=crop, fit=replace(chosen.fit, size=size))
