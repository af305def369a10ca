"""Save the state of a run: copied to the host between two steps, written in a thread while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoint import Checkpoint, prune, write_checkpoint


class CheckpointSaver:
    """Writes checkpoints into the folder of a run, one after the other.

    Args:
        folder: The folder of the run.
        keep: How many of the newest checkpoints to keep.
        about: The description of the run that every checkpoint contains.
        before: Called in the thread before each checkpoint is written: it flushes the metrics, which must not be older.
    """

    def __init__(self, folder: Path, keep: int, about: dict[str, Any], before: Callable[[], None]) -> None:
        self._folder, self._keep = folder / "checkpoints", keep
        self._about = about
        self._before = before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._saved = time.monotonic()
        self._requested = False
        prune(self._folder, keep)  # a killed run may have left one checkpoint more

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one so far."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        """Copy the state after `step` steps, and start to write it."""
        self._wait()
        self._writing = self._thread.submit(self._write, step, Checkpoint(state(), {**self._about, **about}))
        self._saved, self._requested = time.monotonic(), False

    def requests_save(self, seconds: float) -> bool:
        """Return True once when this many seconds have passed since the last checkpoint; 0 seconds: never."""
        # Once per checkpoint: if this rank may lag, all ranks save only some steps after its request.
        is_due = seconds > 0 and not self._requested and time.monotonic() - self._saved >= seconds
        self._requested = self._requested or is_due
        return is_due

    def close(self) -> None:
        """Wait until everything is on disk, and raise the error of a write that failed."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        self._before()
        write_checkpoint(self._folder, step, checkpoint)
        prune(self._folder, self._keep)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


class NullSaver:
    """The saver of ranks other than 0, which does nothing."""

    def check(self) -> None:
        pass

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        pass

    def requests_save(self, seconds: float) -> bool:
        return False


StateSaver = CheckpointSaver | NullSaver
