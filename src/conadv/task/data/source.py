"""Where images come from: a source has labels, names of classes, and a picture for every index.

folder, tar shards, Parquet ──> Encoded (bytes, decoded on demand) ─┐
digits, synthetic, IDX, CIFAR, NumPy ──> Arrays (all in memory) ────┴─> Source ──> Stream
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_CLASSES, MAX_PIXELS

# Bytes as files hold them: (H, W, C) for one image, (N, H, W, C) for several.
Pixels = NDArray[np.uint8]
# Bytes as models take them: (C, H, W), or (N, C, H, W).
Planes = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Picture:
    """One image whose size is known and whose pixels are not decoded yet."""

    height: int
    width: int
    decode: Callable[[int], Pixels]
    """Takes a factor (1, 2, 4 or 8): the pixels at 1/factor of the size, or larger if that cannot be."""

    def pixels(self, shrink: int = 1) -> Pixels:
        """The image as (H, W, C) bytes."""
        return self.decode(shrink)


_LINE = 1000  # characters
DAMAGE_ADVICE = "repair the data, or leave out what is damaged (data.damaged skip)"


def one_line(text: object) -> str:
    """A text, or what an exception says, as one line that a terminal can print, whatever a file put into it."""
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
        """One class number an image."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class; its place is its number."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """What an error message calls this image."""

    def picture(self, index: int) -> Picture:
        """The image, to be decoded in the size that is needed."""

    def image(self, index: int) -> Pixels:
        """The whole image as (H, W, C) bytes."""

    def take(self, indices: Sequence[int]) -> Source:
        """The source of these images alone."""


@dataclass(frozen=True)
class DataSet:
    """The images to learn from and those to be judged by."""

    train: Source
    test: Source
    name: str
    skipped: tuple[DamagedError, ...] = ()
    """Images that were left out because they cannot be used."""
    notes: tuple[str, ...] = ()
    """What a user should know about how the data is read, one line each."""

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes:
            raise ValueError(
                f"{self.name}: training and test images have different classes "
                f"({len(self.train.classes)} and {len(self.test.classes)}): name the same ones in both"
            )
        for part, source in (("training", self.train), ("test", self.test)):
            if len(source) == 0:
                raise ValueError(f"{self.name}: no {part} images that can be used")


class Arrays:
    """Images of one shape, all in memory.

    Args:
        images: (N, H, W, C).
        labels: The number of the class of each.
        classes: Their names.
        origin: The format of the files, and which of them, or of their arrays, the images were read from; None: none
            that holds the images alone.
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
    """Labels as int64, every one of them the number of a class."""
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
    """The names of classes that are known only by their numbers, 0 to `largest`."""
    if largest >= MAX_CLASSES:
        raise ValueError(f"label {largest}: more than {MAX_CLASSES:,} classes are not supported; number them from 0 on")
    return tuple(str(number) for number in range(largest + 1))
