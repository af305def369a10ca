"""Files of a run: written whole or not at all, and read as what they are, data of bounded size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conadv.atomic import replacing


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, a disk that is full or read-only is an OSError that says what was to be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}): free some space, then resume") from None


def write_atomically(path: Path, text: str) -> None:
    """The file has its old text or the new one, at any moment."""
    with writing(path):
        replace_file(path, text.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Like `write_atomically`, for a caller who has advice of their own where it fails."""
    with replacing(path) as file:
        file.write(data)


def write_flushed(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Let the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """The text of a regular file. A missing one is a FileNotFoundError, anything else that is no file an OSError."""
    _check_regular(path)
    return path.read_text(encoding="utf-8")


def read_bounded(path: Path, largest: int) -> bytes:
    """The content of a file of at most this many bytes; an OSError says what is wrong with it."""
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
