"""Progress of a run or a sweep: a bar on a terminal or in a notebook, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from conadv.parallel.launch import own_rank
from conadv.readable import duration


class ProgressBar:
    """A count out of a total, with a text next to it.

    Args:
        start: What has been done already.
        stop: The total.
        quiet: Print nothing.
        stream: Where to print; None: standard error.
        seconds: Without a terminal, the least time between two lines.
        estimates: Show the remaining time, estimated from the pace, and refresh the bar in a thread. Without, the
            caller puts an estimate into the text; a process that forks must not have that thread.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        quiet: bool,
        stream: TextIO | None = None,
        seconds: float = 5.0,
        estimates: bool = True,
    ) -> None:
        self._stop = stop
        self._stream = stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._quiet = quiet
        self._seconds = seconds
        self._estimates = estimates
        self._last_line = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step of this process, and when it ended
        console = Console(file=stream)
        if not quiet and _can_redraw(console, stream):
            columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
            self._bar = Progress(
                *columns, *[TimeRemainingColumn()] * estimates, console=console, auto_refresh=estimates
            )
            self._task = self._bar.add_task("", total=stop, completed=start)

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, step: int, loss: float, rate: float) -> None:
        """A training step was taken; `step` counts from 1."""
        text = f"loss {loss:.4f}  lr {rate:.4g}{self._time_left(step)}"
        self.show(step, text, f"step {step}/{self._stop}", last=step == self._stop)

    def _time_left(self, step: int) -> str:
        """By the pace so far, the first step left out; a bar on a terminal has a column for it."""
        if self._first is None:
            self._first = (step, time.monotonic())
        first, began = self._first
        if self._bar or step <= first or step >= self._stop:
            return ""
        return f"  {duration((self._stop - step) * (time.monotonic() - began) / (step - first))} left"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """As a metric sink; `step` counts from 0."""
        self.step(step + 1, metrics["loss"], metrics["lr"])

    def close(self) -> None:
        """Stop the bar, as at the end of a `with` block."""
        if self._bar:
            self._bar.stop()

    def show(self, done: int, text: str, count: str, last: bool = False) -> None:
        """Move the bar; without a terminal, print `count` and `text` if the last line is old or this is the end."""
        if self._bar:
            self._bar.update(self._task, completed=done, description=text, refresh=not self._estimates)
        elif last or time.monotonic() - self._last_line > self._seconds:
            self.say(f"{count}  {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._last_line = time.monotonic()
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)


def _can_redraw(console: Console, stream: TextIO) -> bool:
    """Whether a bar can be drawn: on a terminal, or in a Jupyter notebook, where it is a widget."""
    in_notebook = console.is_jupyter and stream is sys.stderr and find_spec("ipywidgets") is not None
    return stream.isatty() or in_notebook


def tell(text: str) -> None:
    """Print a line on standard error, from rank 0 only."""
    if own_rank() == 0:
        with suppress(OSError):  # the launcher that read it may be gone
            print(text, file=sys.stderr, flush=True)
