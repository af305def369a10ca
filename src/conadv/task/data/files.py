"""Encoded images on disk: each is a file of its own, or a part of a larger one such as a tar shard."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_BYTES
from conadv.task.data.decode import open_picture
from conadv.task.data.source import Picture, naming


@dataclass(frozen=True)
class Files:
    """Pictures in files below a folder."""

    root: str
    names: Sequence[str]
    """Path of each image below `root`; of a member of a shard, the path of the shard followed by its name."""
    channels: int
    """1 (grey) or 3 (RGB)."""
    shards: Sequence[str] = ()
    places: NDArray[np.int64] | None = None
    """Number of the shard, offset and size in bytes of each image, (N, 3); None: each image is a file."""

    def name(self, row: int) -> str:
        return self._path(self.names[row])

    def read(self, row: int) -> bytes:
        """The encoded bytes of an image."""
        with naming(self.name(row)):
            if self.places is None:
                return read_file(self.name(row))
            shard, offset, size = self.places[row].tolist()
            return read_file(self._path(self.shards[shard]), offset, size)

    def picture(self, row: int) -> Picture:
        return open_picture(self.read(row), self.channels, self.name(row))

    def _path(self, name: str) -> str:
        return f"{self.root}{os.sep}{name}"


def read_file(path: str | os.PathLike[str], offset: int = 0, size: int | None = None) -> bytes:
    """`size` bytes of a regular file (None: all), which is not kept open: there may be more shards than handles."""
    # Opened without blocking, and refused if it is a FIFO or a device: to read those could take forever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        size = status.st_size if size is None else size
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"{size:,} bytes are more than the limit of {MAX_BYTES:,}")
        data = os.pread(handle, size, offset)
    finally:
        os.close(handle)
    if len(data) < size:
        raise OSError(errno.EIO, "the file is truncated")
    return data
