"""Progress of a sweep: one line when a cell starts and one when it ends, with an estimate of the remaining time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from conadv.readable import duration
from conadv.trainer.progress import ProgressBar

from .results import Result, number


class SweepProgress:
    """Counts cells and estimates the remaining time from the mean time of the finished cells of each arm."""

    def __init__(self, bar: ProgressBar, cells: int, jobs: int) -> None:
        self._bar = bar
        self._cells = cells
        self._jobs = jobs
        self._done = 0
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._missing: dict[str, int] = defaultdict(int)

    def begin(self, results: Sequence[Result]) -> None:
        """Print what there is to do, and count the cells that an earlier sweep has finished."""
        for result in results:
            if result.summary is None:
                self._missing[result.arm] += 1
            else:
                self._done += 1
                self._seconds[result.arm].append(number(result.summary.get("seconds")))
        done = f"; {self._done} of {self._cells} are already done" if self._done else ""
        self._bar.say(f"{self._cells} cells, {self._jobs} at a time{done}{self._time_left(0.0)}")

    def started(self, name: str) -> None:
        """Report a cell that has started."""
        self._bar.say(f"{self._count} {name}: started{self._time_left(0.0)}")

    def ended(self, result: Result, seconds: float) -> None:
        """Report a cell that has finished or failed after `seconds`."""
        self._done += 1
        self._missing[result.arm] -= 1
        if result.summary is None:
            outcome = f"failed: {result.error}"
        else:
            self._seconds[result.arm].append(seconds)
            accuracy = number(result.summary.get("test_top1"))
            outcome = "done" if math.isnan(accuracy) else f"{accuracy:.2f} %"
        left = self._time_left(0.0)
        self._bar.say(f"{self._count} {result.name}: {outcome} ({duration(seconds)}){left}")

    def show(self, running: Sequence[float], waiting: int) -> None:
        """Move the bar. `running`: the seconds so far of each running cell."""
        left = self._time_left(sum(running))
        self._bar.show(self._done, f"{len(running)} running, {waiting} waiting{left}", self._count)

    @property
    def _count(self) -> str:
        return f"[{self._done}/{self._cells}]"

    def _time_left(self, spent: float) -> str:
        """`spent`: seconds so far of the running cells. An arm without a finished cell gets the mean of all."""
        known = [seconds for several in self._seconds.values() for seconds in several]
        missing = sum(self._missing.values())
        if not known or not missing:
            return ""
        work = sum(count * fmean(self._seconds[arm] or known) for arm, count in self._missing.items())
        return f", about {duration(max(0.0, work - spent) / min(self._jobs, missing))} left"
