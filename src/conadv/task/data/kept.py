"""Decoded images kept in memory, so that a small data set is decoded once and not in every epoch."""

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
    """A source that remembers each image as `fit` leaves it, from the first time on that it is asked for.

    Threads share it without a lock: two that decode the same image write the same bytes.

    Args:
        inner: The source of the images, all of which `fit` brings to one shape.
        fit: What is remembered; another fit is decoded as before.
        shape: Channels, height and width of an image.
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
                    f"{self._planes.shape[1:]}: set a size that all images are brought to"
                )
            self._planes[missing] = made
            self._there[missing] = True
        return self._planes[indices]


def fitted(source: Source, indices: NDArray[np.int64], fit: Fit) -> Planes:
    """These images as evaluation sees them, (N, C, H, W): from memory, or decoded."""
    if isinstance(source, Kept) and source.fit == fit:
        return source.planes(indices)
    return decoded(source, indices, fit)


def keep(data: DataSet, fit: Fit, megabytes: int, train: bool = True) -> DataSet:
    """The data set with its images kept in memory, training images first, as far as they fit.

    Args:
        data: What to keep; arrays that are used as they are need no keeping.
        fit: What evaluation, and training unless it crops by itself, brings images to.
        megabytes: How much memory may be used, in MiB.
        train: Whether training looks at fitted images.

    Returns:
        The data set; `DataSet.notes` says so where images will be decoded again in every epoch.
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
    """The shape of a fitted image; None where images are in memory as they are, or the first cannot be decoded."""
    if isinstance(source, Arrays) and fit.keeps(*source.images.shape[1:3]):
        return None
    try:
        return decoded(source, np.zeros(1, np.int64), fit).shape[1:]
    except DamagedError:  # it is named when it is needed
        return None
