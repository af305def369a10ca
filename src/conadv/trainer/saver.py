"""Writes checkpoints in a thread, while training continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from .checkpoint import Checkpoint, prune, write_checkpoint
from .snapshot import Snapshot


class Saver:
    """Writes checkpoints into a folder, one after the other, and keeps the newest of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        prune(folder, keep)  # a run that was killed before it could do so has one checkpoint more
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copying: tuple[Snapshot, Future[None]] | None = None
        self._buffer: Tensor | None = None  # used again, since new memory takes longer than the copy itself

    def save(self, step: int, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Begin to copy and write; the tensors must not change before `before_update`.

        Args:
            step: The number of steps that were taken.
            checkpoint: What to write.
            before: Called before anything is written; its failure is ours.
        """
        self.wait()
        snapshot = Snapshot(checkpoint.tensors, self._buffer)
        self._buffer = snapshot.buffer
        copied: Future[None] = Future()

        def write() -> None:
            try:
                data = snapshot.copy()
            except BaseException as error:
                copied.set_exception(error)
                raise
            copied.set_result(None)
            before()
            write_checkpoint(self._folder, step, checkpoint, data)
            prune(self._folder, self._keep)

        self._copying = snapshot, copied
        self._writing = self._thread.submit(write)

    def before_update(self) -> None:
        """Let the next update come after the copy of what it changes."""
        if self._copying is not None:
            (snapshot, copied), self._copying = self._copying, None
            snapshot.before_update(copied)

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
