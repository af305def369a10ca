"""How images are changed for training, each as a function of its own seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from conadv.task.augment.geometry import DRAWS, Fit, ResizedCrop, Shift
from conadv.task.data.draws import Seeds, mix_all, uniforms
from conadv.task.data.source import Arrays, Pixels, Source

__all__ = ["AUGMENTATIONS", "Augmentation", "Fit", "augmentation", "fitted"]

# What a random number is for, so that two uses never share one.
_GEOMETRY = 1


@dataclass(frozen=True)
class Augmentation:
    """What training sees of an image."""

    crop: Shift | ResizedCrop | None = None
    fit: Fit = field(default_factory=Fit)
    """What evaluation sees, and what `Shift` starts from."""

    def __call__(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> tuple[Pixels, ...]:
        """The views of these images, each (N, H, W, C)."""
        return (self._cropped(source, indices, mix_all(seeds, _GEOMETRY)),)

    def _cropped(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> Pixels:
        match self.crop:
            case None:
                return fitted(source, indices, self.fit)
            case Shift() as shift:
                return shift(fitted(source, indices, self.fit), seeds)
            case ResizedCrop() as crop:
                draws = uniforms(seeds, DRAWS)
                pictures = (source.picture(index) for index in indices.tolist())
                return np.stack([crop(picture, row) for picture, row in zip(pictures, draws, strict=True)])


def fitted(source: Source, indices: NDArray[np.int64], fit: Fit) -> Pixels:
    """These images as evaluation sees them, (N, H, W, C)."""
    if isinstance(source, Arrays) and fit.keeps(*source.images.shape[1:3]):
        return source.images[indices]
    images = [fit(source.picture(index)) for index in indices.tolist()]
    for index, image in zip(indices.tolist(), images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"{source.name(index)} has shape {image.shape} and {source.name(int(indices[0]))} "
                f"{images[0].shape}: set a size that all images are brought to"
            )
    return np.stack(images)


AUGMENTATIONS = {
    "none": Augmentation(),
    "crop": Augmentation(Shift(flip=False)),
    "crop-flip": Augmentation(Shift()),
    "resized-crop": Augmentation(ResizedCrop(224), Fit(224, zoom=256 / 224)),
}


def augmentation(name: str, size: int | None = None) -> Augmentation:
    """The augmentation of that name, for images of `size` × `size` pixels (None: the data's own, or 224)."""
    if name not in AUGMENTATIONS:
        raise ValueError(f"augmentation {name!r}: choose one of {', '.join(AUGMENTATIONS)}")
    chosen = AUGMENTATIONS[name]
    if size is None:
        return chosen
    crop = ResizedCrop(size) if isinstance(chosen.crop, ResizedCrop) else chosen.crop
    return replace(chosen, crop=crop, fit=replace(chosen.fit, size=size))
