"""The progress bar of a run or a sweep on a terminal or in a notebook; plain lines elsewhere."""

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

from conadv.ranks.launch import own_rank
from conadv.readable import duration


class ProgressBar:
    """A progress bar with a text next to it, and a metric sink.

    Args:
        start: How much is done already.
        stop: The total.
        quiet: Print nothing.
        stream: Where to print; None: standard error.
        seconds: Without a terminal, the shortest time between two lines.
        estimates: Show the estimated remaining time, and refresh the bar in a thread. A process that forks must not
            have such a thread.
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
        self._first: tuple[int, float] | None = None  # the first step of this process, and its time
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

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a training step, which counts from 0, and print the accuracy if the step was evaluated."""
        done = step + 1
        attackers = f"  attackers {metrics['attackers']:.0f}" if "attackers" in metrics else ""
        text = f"loss {metrics['loss']:.4f}  lr {metrics['lr']:.4g}{attackers}{self._time_left(done)}"
        self.show(done, text, f"step {done}/{self._stop}", last=done == self._stop)
        if accuracies := [f"{name} {value:.2f} %" for name, value in metrics.items() if name.endswith("_top1")]:
            self.say(f"step {done}/{self._stop}  {', '.join(accuracies)}")

    def close(self) -> None:
        """Stop the bar, as at the end of a `with` block."""
        if self._bar:
            self._bar.stop()

    def _time_left(self, done: int) -> str:
        """Estimate the remaining time from the pace after the first step; a bar has its own column for it."""
        if self._first is None:
            self._first = (done, time.monotonic())
        first, began = self._first
        if self._bar or done <= first or done >= self._stop:
            return ""
        return f"  {duration((self._stop - done) * (time.monotonic() - began) / (done - first))} left"

    def show(self, done: int, text: str, count: str, last: bool = False) -> None:
        """Update the bar; without a terminal, print `count` and `text` if the last line is old or `last` is set."""
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
    """Whether a bar can be drawn: on a terminal, or as a widget in a Jupyter notebook."""
    in_notebook = console.is_jupyter and stream is sys.stderr and find_spec("ipywidgets") is not None
    return stream.isatty() or in_notebook


def tell(text: str) -> None:
    """Print a line on standard error, from rank 0 only."""
    if own_rank() == 0:
        with suppress(OSError):  # the launcher, which reads it, may be gone
            print(text, file=sys.stderr, flush=True)
