"""Sources of images: labels, class names, and a picture for every index.

digits, synthetic, CIFAR, NumPy ──► Arrays ─┐
image folder, tar shards ─────────► Files   ├─► Source (some rows of these, with labels) ──► Stream
hf:NAME, your own Dataset ────────► Items  ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from conadv.printing import one_line, readable
from conadv.task.draws import stratified

# Bytes as stored in files: (H, W, C) for one image, (N, H, W, C) for several.
Pixels = NDArray[np.uint8]
# Bytes as models take them: (C, H, W), or (N, C, H, W).
Planes = NDArray[np.uint8]
Labels = NDArray[np.int64]

DAMAGE_ADVICE = "repair the data, or leave out what is damaged (data.damaged skip)"
_MAX_CLASSES = 100_000  # more than any data set has: a label beyond it is a mistake, not a class


class DamagedError(ValueError):
    """An image, or a file of images, that cannot be used: its name and why, each one line."""

    def __init__(self, name: object, reason: object) -> None:
        self.name, self.reason = one_line(name), one_line(reason)
        super().__init__(f"{self.name}: {self.reason}")


@contextmanager
def naming(name: object, advice: str = "") -> Iterator[None]:
    """Turn any error within into a DamagedError: one line that names what is read, and says what to do."""
    try:
        yield
    except DamagedError:
        raise
    except MemoryError:
        raise ValueError(f"{one_line(name)}: not enough memory to read it; lower data.workers") from None
    except Exception as error:  # readers fail in many ways on damaged bytes
        if isinstance(error, OSError):
            name, reason = error.filename or name, error.strerror or one_line(error)
        else:
            reason = one_line(error)
        raise DamagedError(name, f"{reason}; {advice}" if advice else reason) from error


class Picture(NamedTuple):
    """An image whose size is known, and whose pixels are decoded on demand."""

    height: int
    width: int
    pixels: Callable[[int], Pixels]
    """Takes a factor (1, 2, 4 or 8), and returns the pixels at 1/factor of the size, or larger if it cannot."""


class Pictures(Protocol):
    """Where the images of a source are: a picture and its name by row."""

    def name(self, row: int) -> str: ...

    def picture(self, row: int) -> Picture: ...


class Arrays:
    """Pictures of one shape, (N, H, W, C) bytes, in memory or memory-mapped."""

    def __init__(self, images: NDArray[Any]) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape:
            raise ValueError(
                f"images are {images.dtype} of shape {images.shape}: make them uint8 of shape (N, H, W, C)"
            )
        self.images: Pixels = images

    def name(self, row: int) -> str:
        return f"image {row}"

    def picture(self, row: int) -> Picture:
        image: Pixels = self.images[row]
        return Picture(image.shape[0], image.shape[1], lambda shrink: image)


class Source:
    """Labelled images by index: some rows of `pictures`.

    Args:
        pictures: The images.
        labels: The class number of each image of this source.
        classes: Class names, in the order of their numbers.
        rows: Which rows of `pictures` this source has; None: all.
    """

    kept: Any = None
    """Decoded images in memory (`fit.keep`)."""

    def __init__(
        self, pictures: Pictures, labels: NDArray[Any], classes: tuple[str, ...], rows: Labels | None = None
    ) -> None:
        self.pictures, self.classes = pictures, classes
        self.rows = np.arange(len(labels)) if rows is None else rows
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError(f"labels are {labels.dtype} of shape {labels.shape}: give one whole number per image")
        if len(wrong := np.flatnonzero((labels < 0) | (labels >= len(classes)))):
            raise ValueError(
                f"{self.name(wrong[0])} has label {labels[wrong[0]]}, but the {len(classes)} classes are numbered "
                f"0 to {len(classes) - 1}: correct the label or name more classes"
            )
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> Pixels:
        """All images as (N, H, W, C) bytes; only of sources that are arrays. The examples and the tutorial use it."""
        assert isinstance(self.pictures, Arrays)
        return self.pictures.images[self.rows]

    def name(self, index: int) -> str:
        """The name of this image in error messages."""
        return self.pictures.name(int(self.rows[index]))

    def picture(self, index: int) -> Picture:
        """The image with its size, not decoded yet."""
        return self.pictures.picture(int(self.rows[index]))

    def image(self, index: int) -> Pixels:
        """The whole image as (H, W, C) bytes."""
        return self.picture(index).pixels(1)

    def take(self, indices: Sequence[int] | NDArray[np.integer]) -> Source:
        """A source of these images only."""
        chosen = np.asarray(indices, np.int64)
        return Source(self.pictures, self.labels[chosen], self.classes, self.rows[chosen])

    def split(self, count: int) -> tuple[Source, Source]:
        """`count` of these images, as balanced over the classes as possible, and the others; the same in every run."""
        chosen = stratified(self.labels, len(self.classes), count)
        return self.take(np.flatnonzero(chosen)), self.take(np.flatnonzero(~chosen))


@dataclass(frozen=True)
class DataSet:
    """Training and test images."""

    train: Source
    test: Source
    name: str
    skipped: tuple[DamagedError, ...] = ()
    """What was left out because it cannot be used."""
    notes: tuple[str, ...] = ()
    """Messages for the user about how the data is read, one line each."""

    def __post_init__(self) -> None:
        assert self.train.classes == self.test.classes
        for part, source in (("training", self.train), ("test", self.test)):
            if len(source) == 0:
                raise ValueError(f"no {part} images that can be used")

    def facts(self) -> dict[str, Any]:
        """What tells this data from other data, as JSON values: ranks compare it, and resumed runs."""
        return {
            "classes": list(self.train.classes),
            "training images": len(self.train),
            "training labels": _digest(self.train.labels.tobytes()),
            "training pixels": _digest(self.train.image(0).tobytes()),  # all would take minutes
            "test images": len(self.test),
            "test labels": _digest(self.test.labels.tobytes()),
        }

    def difference(self, before: Mapping[str, Any], classes_only: bool) -> str:
        """Return what differs from the facts of before, such as "training images 1,270, then 1,143"; empty: nothing."""
        for name, now in self.facts().items():
            if before.get(name, now) != now and (name == "classes" or not classes_only):
                then, is_now = (one_line(readable(name, value)) for value in (before[name], now))
                return f"{name} {then}, then {is_now}"
        return ""


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:12]


class Found(NamedTuple):
    """What a format has: training images, test images if there are any, and what was left out as visibly damaged."""

    parts: Sequence[Source]
    problems: Sequence[DamagedError] = ()


def labelled(
    pictures: Sequence[Pictures], labels: Sequence[NDArray[Any]], classes: tuple[str, ...] | None = None
) -> list[Source]:
    """A source for each part; without names for the classes, these are 0 to the largest label."""
    if not classes:
        largest = max(int(part.max(initial=0)) for part in labels)
        if largest >= _MAX_CLASSES:
            raise ValueError(f"label {largest}: more than {_MAX_CLASSES:,} classes are not supported; number from 0 on")
        classes = tuple(str(number) for number in range(largest + 1))
    return [Source(part, own, classes) for part, own in zip(pictures, labels, strict=True)]
