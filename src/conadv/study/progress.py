"""How a sweep tells of itself: a line for each cell that ends, and on a terminal a bar below them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .results import Result


class SweepWatch:
    """Counts cells and estimates the time that is left."""

    def __init__(self, cells: int, jobs: int, quiet: bool, stream: TextIO | None = None) -> None:
        self._cells = cells
        self._jobs = jobs
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._ended = 0
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._arms: dict[str, int] = defaultdict(int)
        self._bar: Progress | None = None
        if not quiet and self._stream.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            # No thread of its own: processes are forked while the bar is shown.
            self._bar = Progress(*columns, auto_refresh=False, console=Console(file=self._stream))
            self._task = self._bar.add_task("", total=cells)

    def __enter__(self) -> SweepWatch:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, results: Sequence[Result]) -> None:
        """What an earlier sweep has done already."""
        for result in results:
            if result.summary is None:
                self._arms[result.arm] += 1
            else:
                self._ended += 1
                self._seconds[result.arm].append(result.summary["seconds"])
        if self._ended:
            self._say(f"{self._ended} of {self._cells} cells are done already")

    def ended(self, result: Result, seconds: float) -> None:
        """A cell has come to its end, well or not."""
        self._ended += 1
        self._arms[result.arm] -= 1
        if result.summary is not None:
            self._seconds[result.arm].append(seconds)
        outcome = f"failed: {result.error}" if result.summary is None else f"{result.summary['test_top1']:.2f} %"
        left = self._left(0.0)
        self._say(f"[{self._ended}/{self._cells}] {result.name}: {outcome} ({duration(seconds)}){left}")

    def show(self, running: Sequence[tuple[Any, float]], waiting: int) -> None:
        """Refresh the bar, if there is one."""
        if self._bar:
            names = f"{len(running)} running, {waiting} waiting"
            spent = sum(seconds for _, seconds in running)
            self._bar.update(self._task, completed=self._ended, description=names + self._left(spent), refresh=True)

    def _left(self, spent: float) -> str:
        """By the mean time of an arm's cells, or of all while the arm has none; `spent` is on cells still at work."""
        known = [seconds for several in self._seconds.values() for seconds in several]
        missing = sum(self._arms.values())
        if not known or not missing:
            return ""
        work = sum(count * fmean(self._seconds[arm] or known) for arm, count in self._arms.items())
        return f", about {duration(max(0.0, work - spent) / min(self._jobs, missing))} left"

    def _say(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """As people say it: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
