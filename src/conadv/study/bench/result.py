"""Results: a ratio or a time, each the median over the rounds with its spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .alternate import Lap, Laps

Unit = Literal["seconds", "seconds_per_image"]
_FIELDS = ("low", "high", "median_low", "median_high", "n")


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, how they scatter, and how far the median is to be trusted."""

    median: float
    low: float
    """The 10th percentile of the rounds."""
    high: float
    """The 90th."""
    median_low: float
    """With `median_high`: 95 % sure to hold the true median, whatever the distribution; less below 6 rounds."""
    median_high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        rank = _sure_rank(len(ordered))
        low, median, high = (_percentile(ordered, part) for part in (0.1, 0.5, 0.9))
        return cls(median, low, high, ordered[rank - 1], ordered[-rank], len(ordered))

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _FIELDS}


@dataclass(frozen=True)
class Goal:
    """What a ratio should be: at most, or at least, a limit."""

    relation: Literal["≤", "≥"]
    limit: float

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.limit if self.relation == "≤" else ratio >= self.limit

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Ratio:
    """How many times the time of the second the first takes, by the clock that the benchmark says it goes by."""

    name: str
    """FIRST/SECOND"""
    spread: Spread
    goal: Goal | None = None
    wall: float | None = None
    """By the clock on the wall, where the ratio is one of processor times."""
    work: float | None = None
    """By the processor time of the busiest rank, where the ratio is one of times on the wall: without any waiting."""
    flops: float | None = None
    """The same ratio of operations, counted."""
    composed: bool | None = None
    """Whether a side was put together from parts, each measured alone."""

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, "ratio": self.spread.median, **self.spread.to_json()}
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
class Time:
    """Seconds, of a pass over an image say, under the name that the planner knows."""

    name: str
    unit: Unit
    spread: Spread

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, self.unit: self.spread.median, **self.spread.to_json()}


Result = Ratio | Time


@dataclass(frozen=True)
class Findings:
    """What a benchmark found, and what a reader has to be told beside it."""

    results: Sequence[Result]
    heartbeats: Sequence[str] = ()
    profile: Sequence[Mapping[str, Any]] = ()
    """Where the time of a step went: a row a rank."""


def work_time(lap: Lap) -> float:
    """Seconds by the clock that ratios within one process go by.

    One thread that never waits takes as much time on the wall as on its core, unless others use the core too; their
    part is left out by the clock of the process. A device works beside the process, so there it is the wall's.
    """
    return lap.wall if torch.cuda.is_available() else lap.cpu


def wall_time(lap: Lap) -> float:
    return lap.wall


def compare(laps: Laps, first: str, second: str, by: Callable[[Lap], float]) -> Spread:
    """The ratio of two candidates: of the times of each round, and then the median of the rounds."""
    pairs = zip(laps[first], laps[second], strict=True)
    return Spread.of([by(above) / by(below) for above, below in pairs])


def work_ratio(laps: Laps, first: str, second: str, goal: Goal | None = None, flops: float | None = None) -> Ratio:
    """The ratio of two candidates that ran in one process, with that of the clock on the wall beside it."""
    wall = compare(laps, first, second, wall_time).median
    return Ratio(f"{first}/{second}", compare(laps, first, second, work_time), goal, wall=wall, flops=flops)


def _percentile(ordered: Sequence[float], part: float) -> float:
    """Between the two nearest values, in proportion."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _sure_rank(n: int) -> int:
    """The largest r such that fewer than r of n values lie below the median with a probability of at most 2.5 %."""
    probability, rank = 0.0, 0
    while rank < n:
        probability += math.comb(n, rank) / 2**n
        if probability > 0.025:
            break
        rank += 1
    return max(rank, 1)
