"""Files of a run: atomic writes, and reads of limited size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conadv.atomic import replacing


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path and advice to the OSError of a disk that is full or read-only."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}): free some space, then resume") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace the text of a file: readers see the old text or the new one, never a part of it."""
    with writing(path):
        replace_file(path, text.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Like `write_atomically`, for callers that handle the OSError themselves."""
    with replacing(path) as file:
        file.write(data)


def write_flushed(path: Path, data: bytes | memoryview) -> None:
    """Write a file and wait until its content is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Read the text of a regular file; a missing one is a FileNotFoundError, a pipe or a device an OSError."""
    _check_regular(path)
    return path.read_text(encoding="utf-8")


def read_bounded(path: Path, largest: int) -> bytes:
    """Read a file of at most `largest` bytes; an OSError names the file and says what is wrong with it."""
    _check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except MemoryError:
        raise OSError(f"{path} does not fit into memory") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror or error})") from None
    if len(data) > largest:
        raise OSError(f"{path} has more than {largest} bytes, so it was not written by this run")
    return data


def _check_regular(path: Path) -> None:
    """Refuse a pipe or a device: it would keep us waiting, or never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
