"""Results: ratios and times, each the median over the rounds with its spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from .alternate import Lap, Laps

Unit = Literal["ratio", "seconds", "seconds_per_image"]


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, their percentiles, and a confidence interval of the median."""

    median: float
    low: float
    """The 10th percentile of the rounds."""
    high: float
    """The 90th percentile."""
    median_low: float
    """With `median_high`: a distribution-free 95 % confidence interval of the median; less than 95 % below 6 rounds."""
    median_high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value per round."""
        ordered = sorted(values)
        rank = _sure_rank(len(ordered))
        low, median, high = np.percentile(ordered, [10, 50, 90]).tolist()
        return cls(median, low, high, ordered[rank - 1], ordered[-rank], len(ordered))

    @classmethod
    def of_ratio(cls, above: Iterable[float], below: Iterable[float]) -> Spread:
        """The spread of the ratios of two candidates, round by round."""
        return cls.of([first / second for first, second in zip(above, below, strict=True)])

    def to_json(self, unit: str) -> dict[str, float]:
        """The numbers, with the median under the name of its unit."""
        numbers = asdict(self)
        return {unit: numbers.pop("median"), **numbers}


@dataclass(frozen=True)
class Goal:
    """A target for a ratio: at most, or at least, a limit."""

    relation: Literal["≤", "≥"]
    limit: float

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.limit if self.relation == "≤" else ratio >= self.limit

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Result:
    """A ratio of two times, or a time."""

    name: str
    """FIRST/SECOND of a ratio; of a time, the name of what was timed."""
    spread: Spread
    goal: Goal | None = None
    unit: Unit = "ratio"
    wall: float | None = None
    """The ratio of wall times, if `spread` is that of CPU times."""
    work: float | None = None
    """The ratio of CPU times of the busiest rank, without waiting, if `spread` is that of wall times."""
    flops: float | None = None
    """The ratio of FLOPs."""
    composed: bool | None = None
    """Whether one of the times was composed from parts that were measured separately."""

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, **self.spread.to_json(self.unit)}
        if self.goal is not None:
            entry |= {"goal": str(self.goal), "met": self.goal.is_met(self.spread.median)}
        further = {
            "wall_ratio": self.wall,
            "work_ratio": self.work,
            "flop_ratio": self.flops,
            "composed": self.composed,
        }
        return entry | {key: value for key, value in further.items() if value is not None}


@dataclass(frozen=True)
class Findings:
    """The results of a benchmark, and notes for the reader."""

    results: Sequence[Result]
    notes: Sequence[str] = ()


def work_time(lap: Lap) -> float:
    """Seconds for ratios within one process: CPU time, which leaves out other users of the core.

    On a GPU it is wall time, because the process waits while the device works.
    """
    return lap.wall if torch.cuda.is_available() else lap.cpu


def wall_time(lap: Lap) -> float:
    return lap.wall


def compare(laps: Laps, first: str, second: str, by: Callable[[Lap], float]) -> Spread:
    """The ratios of two candidates, round by round."""
    return Spread.of_ratio(map(by, laps[first]), map(by, laps[second]))


def work_ratio(laps: Laps, first: str, second: str, goal: Goal | None = None, flops: float | None = None) -> Result:
    """The ratio of two candidates that ran in one process, by `work_time` and by wall time."""
    wall = compare(laps, first, second, wall_time).median
    return Result(f"{first}/{second}", compare(laps, first, second, work_time), goal, wall=wall, flops=flops)


def _sure_rank(n: int) -> int:
    """The largest r such that fewer than r of n values lie below the median with a probability of at most 2.5 %."""
    probabilities = accumulate(math.comb(n, below) * 0.5**n for below in range(n))
    return max(1, sum(probability <= 0.025 for probability in probabilities))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align a header and rows in columns: text to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    to_right = [all(_is_number(row[place]) for row in rows[1:]) for place in range(len(rows[0]))]
    rule = ["─" * width for width in widths]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    """Whether a cell holds a number or a placeholder for one."""
    return cell in ("", "-") or cell.lstrip("+-")[:1].isdigit()
