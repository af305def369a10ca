"""Writes checkpoints in a thread, while training continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from .checkpoint import Checkpoint, prune, write_checkpoint


class Saver:
    """Writes checkpoints into a folder, one after the other, and keeps the newest of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Start to write; the tensors must not change any more. `before` runs first; its error counts as ours."""
        self.wait()

        def write() -> None:
            before()
            write_checkpoint(self._folder, step, checkpoint)
            prune(self._folder, self._keep)

        self._writing = self._thread.submit(write)

    def check(self) -> None:
        """Raise the error of a write that has failed, if any."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Block until pending writes are on disk; raise what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()
