"""Write checkpoints in a thread while training continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from .checkpoint import Checkpoint, prune, write_checkpoint
from .snapshot import Snapshot


class Saver:
    """Writes checkpoints into a folder, one after the other.

    Args:
        folder: The folder of the checkpoints.
        keep: How many of the newest ones to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        prune(folder, keep)  # a killed run may have left one checkpoint more
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copying: tuple[Snapshot, Future[None]] | None = None
        self._buffer: Tensor | None = None  # reused, since allocating it takes longer than the copy itself

    def save(self, step: int, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Start to copy and write; the tensors must not change before `before_update`.

        Args:
            step: How many steps were taken.
            checkpoint: What to write.
            before: Called in the thread before anything is written; its errors are raised like those of the write.
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
        """Wait until the tensors are copied, so that the next update may change them."""
        if self._copying is not None:
            (snapshot, copied), self._copying = self._copying, None
            snapshot.before_update(copied)

    def check(self) -> None:
        """Raise the error of the last write if it has failed."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last write is on disk, and raise its error if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()
