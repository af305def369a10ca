"""Encoded images in files, decoded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_CLASSES
from conadv.task.data.decode import open_picture
from conadv.task.data.source import DamagedError, Picture, Pixels, checked_labels, number_names

# With more wrong labels than this, the whole data set is wrong, and its images are not listed one by one.
_MAX_WRONG = 100_000


class Reader(Protocol):
    """Reads the bytes of an image by its index."""

    def __call__(self, index: int, /) -> bytes: ...

    def take(self, indices: Sequence[int]) -> Self:
        """A reader of these images only, in this order."""


class Encoded:
    """A source whose images are encoded as JPEG, PNG and the like."""

    def __init__(
        self,
        names: Sequence[str],
        labels: NDArray[np.integer],
        classes: tuple[str, ...],
        read: Reader,
        channels: int = 3,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels {channels}: choose 1 (grey) or 3 (RGB)")
        self._names, self.read, self.channels = names, read, channels
        self.labels = checked_labels(labels, classes)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return self._names[index]

    def encoded(self, index: int) -> bytes:
        """The encoded bytes of an image."""
        try:
            return self.read(index)
        except OSError as error:
            raise DamagedError(self.name(index), error.strerror or str(error)) from error

    def picture(self, index: int) -> Picture:
        return open_picture(self.encoded(index), self.channels, self.name(index))

    def image(self, index: int) -> Pixels:
        return self.picture(index).pixels()

    def take(self, indices: Sequence[int]) -> Encoded:
        kept = list(indices)
        names = [self._names[index] for index in kept]
        return Encoded(names, self.labels[kept], self.classes, self.read.take(kept), self.channels)


@dataclass(frozen=True)
class Listing:
    """The contents of a folder, shards or tables, before labels are checked and images decoded."""

    names: Sequence[str]
    labels: NDArray[np.int64]
    read: Reader
    problems: tuple[DamagedError, ...] = ()
    """Damage found while listing; these images are not in the listing."""

    def source(self, classes: tuple[str, ...], channels: int) -> tuple[Encoded, tuple[DamagedError, ...]]:
        """The images whose label is a class number, and the problems of all others."""
        right = (self.labels >= 0) & (self.labels < len(classes))
        if (wrong := int((~right).sum())) > _MAX_WRONG:
            raise ValueError(
                f"{self.names[int(np.argmin(right))]} and {wrong - 1:,} more have a label outside 0 to "
                f"{len(classes) - 1}: correct the labels or name more classes"
            )
        everything = Encoded(self.names, np.where(right, self.labels, 0), classes, self.read, channels)
        reasons = tuple(
            DamagedError(self.names[index], f"label {self.labels[index]}, but the classes are 0 to {len(classes) - 1}")
            for index in np.flatnonzero(~right).tolist()
        )
        usable = everything.take(np.flatnonzero(right).tolist()) if reasons else everything
        return usable, self.problems + reasons


def numbered_classes(*listings: Listing) -> tuple[str, ...]:
    """Names for classes that are known by number only."""
    labels = np.concatenate([listing.labels for listing in listings])
    return number_names(int(labels[labels < MAX_CLASSES].max(initial=0)))
