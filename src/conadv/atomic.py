"""Atomic writes: a file has its old content or the new one, complete, at any moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which is flushed to disk and replaces `path` at the end, but not after an error."""
    with replacing_path(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing_path(path: Path) -> Iterator[Path]:
    """Like `replacing`, for code that opens files itself: yield the path of a temporary file to write."""
    # Unique, since several processes may write the same file; a reopened run folder is swept of `.*.partial`.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
