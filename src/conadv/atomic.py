"""Files that a run writes and reads: atomic writes, errors that say what to do, and regular files only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which is flushed and replaces `path` at the end, but not after an error."""
    # Unique, since several processes may write the same file; a reopened run folder is swept of `.*.partial`.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file: readers see the old content or the new one, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_atomically(path: Path, text: str) -> None:
    """Like `replace_file`, with errors that give advice."""
    with writing(path):
        replace_file(path, text.encode())


def write_output(path: Path, data: bytes) -> None:
    """Like `replace_file`, for a file that the user has named; its folder is created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror or error}): name another file") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path and advice to the OSError of a disk that is full or read-only."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror or error}): free some space, then resume") from None


def read_text(path: Path) -> str:
    """Read the text of a regular file; a missing one is a FileNotFoundError, a pipe or a device an OSError."""
    if path.exists() and not path.is_file():  # it would keep us waiting, or never end
        raise OSError(f"{path} is not a regular file")
    return path.read_text(encoding="utf-8")


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
