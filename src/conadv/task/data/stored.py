"""Read encoded images: each is a file of its own, or a part of a larger one such as a tar shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_ENCODED
from conadv.task.data.regular import open_regular, read_bounded, read_whole


@dataclass(frozen=True)
class Parts:
    """For each image the number of its file, and its position there."""

    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    """In bytes."""
    size: NDArray[np.int64]
    """In bytes."""


class Stored:
    """Reads images by their index.

    Args:
        files: The paths of the files.
        parts: The file and position of each image; None: each file is one image.
    """

    def __init__(self, files: Sequence[str], parts: Parts | None = None) -> None:
        self.files, self.parts = files, parts

    def __call__(self, index: int) -> bytes:
        if self.parts is None:
            return read_whole(self.files[index], MAX_ENCODED)
        file, offset, size = (int(column[index]) for column in (self.parts.file, self.parts.offset, self.parts.size))
        return read_part(Path(self.files[file]), offset, size)

    def take(self, indices: Sequence[int]) -> Stored:
        """A reader of these images only, in this order."""
        if self.parts is None:
            return Stored([self.files[index] for index in indices])
        kept = np.asarray(indices, np.int64)
        return Stored(self.files, Parts(self.parts.file[kept], self.parts.offset[kept], self.parts.size[kept]))


def read_part(path: Path, offset: int, size: int) -> bytes:
    """`size` bytes of a file, which is not kept open: there may be more shards than file handles."""
    with open_regular(path) as file:
        file.seek(offset)
        data = read_bounded(file, size, MAX_ENCODED)
    if len(data) < size:
        raise OSError(f"{path.name} is truncated")
    return data
