"""Reading files that others wrote: regular files only, bounded, and every problem one line with the file's name."""

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
    """Open a regular file for reading, unbuffered; FIFOs, devices and sockets, which could block, are refused.

    Args:
        path: The file; symbolic links are followed.

    Returns:
        The open file, to be closed by the caller.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # a Path would take longer than small images
        raise _not_regular(path)
    # Between the two looks the file may have been replaced: without waiting, and looked at again.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return io.FileIO(handle, "rb")


def read_whole(path: str | Path, limit: int) -> bytes:
    """All bytes of a regular file, which may be at most `limit`."""
    with open_regular(path) as file:
        return read_bounded(file, os.fstat(file.fileno()).st_size, limit)


def read_bounded(file: io.FileIO, size: int, limit: int) -> bytes:
    """The next `size` bytes of a file, or all that it has; more than `limit` are refused before they are read."""
    if size > limit:
        raise OSError(errno.EFBIG, f"{size:,} bytes are more than the {limit:,} that are read")
    return file.read(size)


class Readable(Protocol):
    """A file, or what unpacks one."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def read_exactly(file: Readable, size: int) -> NDArray[np.uint8]:
    """The next `size` bytes of a file that may be compressed; an EOFError where it has fewer."""
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
    """Whatever goes wrong with the bytes of a file, as a DamagedError of one line with its name and some advice."""
    try:
        yield
    except DamagedError:
        raise
    except MemoryError:
        raise ValueError(f"{path}: not enough memory to read it; close other programs, or use less data") from None
    except Exception as error:  # parsers fail in many ways on bytes that are not what they seem
        raise DamagedError(str(path), f"{one_line(error)}; {advice}") from error


@contextmanager
def plain_errors(path: str | Path) -> Iterator[None]:
    """What the system refuses while the data at `path` is opened, as a ValueError of one line."""
    try:
        yield
    except ValueError as error:
        if str(error).isprintable():
            raise
        raise ValueError(one_line(error)) from error  # a name on disk may have a line break in it
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise ValueError(one_line(f"{where}: {error.strerror or error}; check the path and its permissions")) from error
    except MemoryError:
        raise ValueError(
            f"{path}: not enough memory; lower data.workers or data.train_size, or close other programs"
        ) from None


def _not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))
