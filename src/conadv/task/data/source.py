"""Sources of images: labels, class names, and a picture for every index.

folder, tar shards, hub ──> Encoded (bytes, decoded on demand) ─┐
digits, synthetic, CIFAR, NumPy ──> Arrays (all in memory) ─────┴─> Source ──> Stream
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_CLASSES, MAX_PIXELS

# Bytes as stored in files: (H, W, C) for one image, (N, H, W, C) for several.
Pixels = NDArray[np.uint8]
# Bytes as models take them: (C, H, W), or (N, C, H, W).
Planes = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Picture:
    """An image whose size is known, and whose pixels are decoded on demand."""

    height: int
    width: int
    decode: Callable[[int], Pixels]
    """Takes a factor (1, 2, 4 or 8), and returns the pixels at 1/factor of the size, or larger if it cannot."""

    def pixels(self, shrink: int = 1) -> Pixels:
        """The image as (H, W, C) bytes."""
        return self.decode(shrink)


_LINE = 1000  # characters
DAMAGE_ADVICE = "repair the data, or leave out what is damaged (data.damaged skip)"


def one_line(text: object) -> str:
    """A text or the message of an exception as one printable line, whatever a file put into it."""
    words = " ".join(str(text).split()) or type(text).__name__
    printable = "".join(character if character.isprintable() else "?" for character in words)
    return printable if len(printable) <= _LINE else f"{printable[:_LINE]}…"


class DamagedError(ValueError):
    """An image, or a file of images, that cannot be used: its name and why, each one line."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = one_line(name), one_line(reason)
        super().__init__(f"{self.name}: {self.reason}")


class Source(Protocol):
    """Labelled images by index."""

    @property
    def labels(self) -> Labels:
        """The class number of each image."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of their numbers."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of this image in error messages."""

    def picture(self, index: int) -> Picture:
        """The image, not decoded yet."""

    def image(self, index: int) -> Pixels:
        """The whole image as (H, W, C) bytes."""

    def take(self, indices: Sequence[int]) -> Source:
        """A source of these images only."""


@dataclass(frozen=True)
class DataSet:
    """Training and test images."""

    train: Source
    test: Source
    name: str
    skipped: tuple[DamagedError, ...] = ()
    """Images that were left out because they cannot be used."""
    notes: tuple[str, ...] = ()
    """Messages for the user about how the data is read, one line each."""

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes:
            raise ValueError(
                f"{self.name}: training and test images have different classes "
                f"({len(self.train.classes)} and {len(self.test.classes)}): use the same ones in both"
            )
        for part, source in (("training", self.train), ("test", self.test)):
            if len(source) == 0:
                raise ValueError(f"{self.name}: no {part} images that can be used")


class Arrays:
    """Images of one shape, all in memory.

    Args:
        images: (N, H, W, C).
        labels: The class number of each image.
        classes: Class names.
        origin: Format, and name of the file or array that holds the images and nothing else; None: there is none.
    """

    def __init__(
        self,
        images: Pixels,
        labels: NDArray[np.integer],
        classes: tuple[str, ...],
        origin: tuple[str, str] | None = None,
    ) -> None:
        if images.dtype != np.uint8 or images.ndim != 4:
            raise ValueError(
                f"images are {images.dtype} of shape {images.shape}: make them uint8 of shape (N, H, W, C)"
            )
        self.labels = checked_labels(labels, classes)
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images have {len(labels)} labels: give one label per image")
        if 0 in images.shape[1:]:
            raise ValueError(f"images of shape {images.shape[1:]} have no pixels: make every side 1 or more")
        if images.shape[1] * images.shape[2] > MAX_PIXELS:
            raise ValueError(f"images of shape {images.shape[1:]}: an image has at most {MAX_PIXELS:,} pixels")
        self.images = images
        self.classes = classes
        self.origin = origin

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"image {index}"

    def picture(self, index: int) -> Picture:
        image = self.image(index)
        return Picture(image.shape[0], image.shape[1], lambda shrink: image)

    def image(self, index: int) -> Pixels:
        image: Pixels = self.images[index]
        return image

    def take(self, indices: Sequence[int]) -> Arrays:
        chosen = np.asarray(indices, np.int64)
        return Arrays(self.images[chosen], self.labels[chosen], self.classes)


def checked_labels(labels: NDArray[np.integer], classes: tuple[str, ...]) -> Labels:
    """Labels as int64, checked to be class numbers."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"labels are {labels.dtype} of shape {labels.shape}: give one whole number per image")
    outside = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"image {first} has label {labels[first]}, but the {len(classes)} classes are numbered "
            f"0 to {len(classes) - 1}: correct the label or name more classes"
        )
    return labels.astype(np.int64)


def number_names(largest: int) -> tuple[str, ...]:
    """Names for classes that are known by number only, 0 to `largest`."""
    if largest >= MAX_CLASSES:
        raise ValueError(f"label {largest}: more than {MAX_CLASSES:,} classes are not supported; number them from 0 on")
    return tuple(str(number) for number in range(largest + 1))
