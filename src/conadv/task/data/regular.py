"""Read untrusted files: regular files only, with limits, and every error one line with the name of the file."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.source import DamagedError, one_line

_PIECE = 2**20  # bytes read at a time


def open_regular(path: str | Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered. FIFOs, devices and sockets are refused: they could block.

    Args:
        path: The file; symbolic links are followed.

    Returns:
        The open file; the caller closes it.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # a Path would take longer than small images
        raise _not_regular(path)
    # The file may have been replaced since: open it without blocking, and check again.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return io.FileIO(handle, "rb")


def read_whole(path: str | Path, limit: int) -> bytes:
    """All bytes of a regular file; raises an OSError if it has more than `limit`."""
    with open_regular(path) as file:
        return read_bounded(file, os.fstat(file.fileno()).st_size, limit)


def read_bounded(file: io.FileIO, size: int, limit: int) -> bytes:
    """The next `size` bytes of a file, or fewer at its end; raises an OSError before reading more than `limit`."""
    if size > limit:
        raise OSError(errno.EFBIG, f"{size:,} bytes are more than the limit of {limit:,}")
    return file.read(size)


class Readable(Protocol):
    """A file, or a decompressor of one."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def read_exactly(file: Readable, size: int) -> NDArray[np.uint8]:
    """The next `size` bytes of a file or decompressor; raises an EOFError if there are fewer."""
    data = np.empty(size, np.uint8)
    view, done = data.data, 0
    while done < size:
        count = file.readinto(view[done : done + _PIECE])
        if not count:
            raise EOFError(f"fewer bytes than its header's {size:,}")
        done += count
    return data


@contextmanager
def named_damage(path: str | Path, advice: str) -> Iterator[None]:
    """Turn any error about the contents of a file into a DamagedError: one line with its name and advice."""
    try:
        yield
    except DamagedError:
        raise
    except MemoryError:
        raise ValueError(f"{path}: not enough memory to read it; close other programs, or use less data") from None
    except Exception as error:  # parsers fail in many ways on damaged bytes
        raise DamagedError(str(path), f"{one_line(error)}; {advice}") from error


@contextmanager
def plain_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of the operating system into a ValueError of one line."""
    try:
        yield
    except ValueError as error:
        if str(error).isprintable():
            raise
        raise ValueError(one_line(error)) from error  # a file name may contain a line break
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise ValueError(one_line(f"{where}: {error.strerror or error}; check the path and its permissions")) from error
    except MemoryError:
        raise ValueError(
            f"{path}: not enough memory; lower data.workers or data.train_size, or close other programs"
        ) from None


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))
