"""What a run leaves in its folder while it goes: metrics and checkpoints. Only the leading rank has one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .checkpoint import Checkpoint
from .metrics import Metrics
from .progress import ProgressBar
from .saver import Saver


class Recorder(Protocol):
    """What the loop tells of itself."""

    def step(self, step: int, **figures: Any) -> None:
        """The figures of a step, which is counted from 0."""

    def save(self, step: int, gather: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        """Keep the state after `step` steps."""

    def seconds_since_save(self) -> float: ...


class NullRecorder:
    """The recorder of ranks that do not lead."""

    def step(self, step: int, **figures: Any) -> None:
        pass

    def save(self, step: int, gather: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        pass

    def seconds_since_save(self) -> float:
        return 0.0


class FolderRecorder:
    """Metrics and checkpoints in the folder of a run, and progress for whoever watches."""

    def __init__(self, folder: Path, start: int, keep: int, about: dict[str, Any], watch: ProgressBar) -> None:
        self._metrics = Metrics(folder / "metrics.jsonl", start)
        self._saver = Saver(folder / "checkpoints", keep)
        self._about = about
        self._watch = watch
        self._saved = time.monotonic()

    @property
    def missing(self) -> int:
        """Steps before the start whose metrics are lost."""
        return self._metrics.missing

    def step(self, step: int, **figures: Any) -> None:
        self._saver.check()
        self._metrics.write(step=step, **figures)
        self._watch.step(step + 1, figures["loss"], figures["lr"])

    def save(self, step: int, gather: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        self._saver.wait()  # before there is another copy of the state
        self._saver.save(step, Checkpoint(gather(), {**self._about, **about}), before=self._metrics.flush)
        self._saved = time.monotonic()

    def seconds_since_save(self) -> float:
        return time.monotonic() - self._saved

    def close(self) -> None:
        """Until everything is on disk; raises what went wrong."""
        try:
            self._saver.wait()
        finally:
            self._saver.close()
            self._metrics.close()
