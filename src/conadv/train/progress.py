"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """Progress: a bar on a terminal, a plain line now and then elsewhere, nothing when quiet."""

    def __init__(self, start: int, stop: int, quiet: bool, stream: TextIO | None = None) -> None:
        self._stop = stop
        self._stream = stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._quiet = quiet
        self._last_line = time.monotonic()
        if not quiet and stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("training", total=stop, completed=start)

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, loss: float, rate: float) -> None:
        """A step was taken; `step` counts from 1."""
        text = f"loss {loss:.4f}  lr {rate:.4g}"
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        elif not self._quiet and (step == self._stop or time.monotonic() - self._last_line > 5):
            self._last_line = time.monotonic()
            self.say(f"step {step}/{self._stop}  {text}")

    def say(self, text: str) -> None:
        """A line that is told once."""
        if self._bar:
            self._bar.console.print(text, highlight=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)
