"""Your own data, as package.module:callable: a function that returns PyTorch Datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from conadv.task.data.decode import pixels_of
from conadv.task.data.source import Picture, Pixels, Source, naming, number_names
from conadv.task.libraries import load_callable


@dataclass(frozen=True)
class Items:
    """Pictures that are the items of a Dataset: (image, label)."""

    part: str
    dataset: Any
    channels: int

    def name(self, row: int) -> str:
        return f"{self.part}[{row}]"

    def picture(self, row: int) -> Picture:
        with naming(self.name(row)):
            pixels = _pixels(self.dataset[row][0], self.channels)
        return Picture(pixels.shape[0], pixels.shape[1], lambda shrink: pixels)


def open_own(reference: str, channels: int) -> tuple[Source, Source | None]:
    """Training and test images of `package.module:callable`.

    It is called without arguments, and returns a Dataset, or a pair of them for training and test. An item is (image,
    label) and the same each time: augmentation is up to the trainer. An image is a Pillow image, an (H, W, C) array of
    bytes, or a (C, H, W) tensor of bytes or of floats in [0, 1]. The attributes `targets` and `classes`, if there are
    any, are the labels, which are otherwise read from the items, and the names of the classes.
    """
    made = load_callable(reference)()
    parts = made if isinstance(made, tuple) else (made,)
    with naming(reference, "return a Dataset, or a pair of them, of (image, label)"):
        labels = [np.array([int(label) for label in _labels(part)], np.int64) for part in parts]
        classes = tuple(map(str, getattr(parts[0], "classes", ()))) or number_names(*labels)
        train, *test = (
            Source(Items(f"{reference} {name}", part, channels), own, classes)
            for name, part, own in zip(("train", "test"), parts, labels, strict=False)
        )
    return train, test[0] if test else None


def _labels(dataset: Any) -> Any:
    return dataset.targets if hasattr(dataset, "targets") else (dataset[row][1] for row in range(len(dataset)))


def _pixels(image: object, channels: int) -> Pixels:
    if isinstance(image, Image.Image):
        return pixels_of(image, channels)
    if isinstance(image, torch.Tensor):
        image = (image * 255).round() if image.is_floating_point() else image
        image = image.to(torch.uint8).movedim(0, -1).numpy()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
        raise ValueError("an image is a Pillow image, an (H, W, C) array of bytes, or a (C, H, W) tensor")
    return image
