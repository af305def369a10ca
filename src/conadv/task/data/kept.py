"""Keep decoded images in memory, so that a small data set is decoded once and not in every epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import free_memory
from conadv.task.data.fit import Fit, decoded
from conadv.task.data.source import Arrays, DamagedError, DataSet, Labels, Picture, Pixels, Planes, Source

_MIB = 2**20


class Kept:
    """A source that caches each image, resized by `fit`, when it is first requested.

    Threads share it without a lock: if two decode the same image, they write the same bytes.

    Args:
        inner: The source of the images.
        fit: What to cache; `fit` must give all images one shape. Other fits are not cached.
        shape: Channels, height and width of a cached image.
    """

    def __init__(self, inner: Source, fit: Fit, shape: tuple[int, ...]) -> None:
        self.inner, self.fit = inner, fit
        self._planes = np.empty((len(inner), *shape), np.uint8)
        self._there = np.zeros(len(inner), np.bool_)

    @property
    def labels(self) -> Labels:
        return self.inner.labels

    @property
    def classes(self) -> tuple[str, ...]:
        return self.inner.classes

    def __len__(self) -> int:
        return len(self.inner)

    def name(self, index: int) -> str:
        return self.inner.name(index)

    def picture(self, index: int) -> Picture:
        return self.inner.picture(index)

    def image(self, index: int) -> Pixels:
        return self.inner.image(index)

    def take(self, indices: Sequence[int]) -> Source:
        return self.inner.take(indices)

    def planes(self, indices: NDArray[np.int64]) -> Planes:
        """These images, (N, C, H, W)."""
        missing = indices[~self._there[indices]]
        if len(missing):
            made = decoded(self.inner, missing, self.fit)
            if made.shape[1:] != self._planes.shape[1:]:
                raise ValueError(
                    f"{self.name(int(missing[0]))} has shape {made.shape[1:]} and {self.name(0)} "
                    f"{self._planes.shape[1:]}: set data.image_size to resize them all"
                )
            self._planes[missing] = made
            self._there[missing] = True
        return self._planes[indices]


def fitted(source: Source, indices: NDArray[np.int64], fit: Fit) -> Planes:
    """These images as evaluation sees them, (N, C, H, W), from memory or decoded now."""
    if isinstance(source, Kept) and source.fit == fit:
        return source.planes(indices)
    return decoded(source, indices, fit)


def keep(data: DataSet, fit: Fit, megabytes: int, train: bool = True) -> DataSet:
    """Keep the images of a data set in memory, training images first, if they fit.

    Args:
        data: The data set; arrays that are used without resizing are in memory already.
        fit: How evaluation resizes images, and training too unless it has its own crop.
        megabytes: Largest memory to use, in MiB.
        train: Whether training uses `fit`.

    Returns:
        The data set. If images will be decoded again in every epoch, `DataSet.notes` says so.
    """
    room = megabytes * _MIB
    parts, notes = {"train": data.train, "test": data.test}, list(data.notes)
    for part, source in parts.items():
        shape = _shape(source, fit) if part == "test" or train else None
        if shape is None:
            continue
        size = len(source) * int(np.prod(shape))
        if size <= min(room, free_memory() // 2):
            parts[part], room = Kept(source, fit, shape), room - size
        elif megabytes and part == "train":
            notes.append(
                f"{part} images are decoded in every epoch: they take {size / _MIB:,.0f} MiB, more than is left of "
                f"data.memory {megabytes}"
            )
    return replace(data, train=parts["train"], test=parts["test"], notes=tuple(notes))


def _shape(source: Source, fit: Fit) -> tuple[int, ...] | None:
    """The shape of a resized image; None if images are used as they are, or if the first cannot be decoded."""
    if isinstance(source, Arrays) and fit.keeps(*source.images.shape[1:3]):
        return None
    try:
        return decoded(source, np.zeros(1, np.int64), fit).shape[1:]
    except DamagedError:  # reported when the image is needed
        return None
