"""Figures over several runs: mean, sample standard deviation, and what they allow one to say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

# Student's t for a two-sided 95 % interval, by degrees of freedom from 1; beyond the list, the normal value is close.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """The mean of n figures; with one there is no standard deviation to speak of."""

    mean: float
    deviation: float | None
    n: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean, by Student's t; None for a single figure."""
        if self.deviation is None:
            return None
        factor = _T95[self.n - 2] if self.n - 2 < len(_T95) else 1.96
        half = factor * self.deviation / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def text(self, digits: int = 1, signed: bool = False) -> str:
        """Such as 37.1 ± 0.4."""
        mean = number(self.mean, digits, signed)
        return mean if self.deviation is None else f"{mean} ± {number(self.deviation, digits)}"

    def interval_text(self, digits: int = 1) -> str:
        if self.interval is None:
            return "–"
        low, high = (number(end, digits, signed=True) for end in self.interval)
        return f"{low} to {high}"


def spread(figures: Iterable[float | None]) -> Spread | None:
    """Of the figures that there are; None where there are none."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return None
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def number(value: float, digits: int, signed: bool = False) -> str:
    """With a true minus sign, and never a minus zero."""
    rounded = round(value, digits) + 0.0
    return f"{rounded:{'+' if signed and rounded else ''}.{digits}f}".replace("-", "−")
