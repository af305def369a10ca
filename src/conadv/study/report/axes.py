"""Scales of drawings: from figures to places, with round numbers at the ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Figures from low to high on a line from start to end, in the units of the drawing."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, here = (self._measure(figure) for figure in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (here - low) / (high - low)

    def _measure(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value


def linear(values: Iterable[float], start: float, end: float, most_ticks: int = 6) -> Scale:
    """A scale around all the values, from one round number to another."""
    known = list(values)
    low, high = min(known), max(known)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    step = round_step((high - low) / max(1, most_ticks - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], start, end, ticks)


def at_values(values: Iterable[float], start: float, end: float) -> Scale:
    """A scale whose ticks are the values themselves: even by ratio where they spread over a factor of 4 or more."""
    ticks = tuple(sorted(set(values)))
    logarithmic = ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]
    if len(ticks) == 1:
        return Scale(ticks[0] - 1, ticks[0] + 1, start, end, ticks)
    return Scale(ticks[0], ticks[-1], start, end, ticks, logarithmic)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """The places moved as little as it takes to be `least` apart and, if they fit, between low and high."""
    order = sorted(range(len(places)), key=lambda number: places[number])
    moved = [places[number] for number in order]
    for number in range(1, len(moved)):
        moved[number] = max(moved[number], moved[number - 1] + least)
    if moved and moved[-1] > high:
        moved[-1] = high
        for number in range(len(moved) - 2, -1, -1):
            moved[number] = min(moved[number], moved[number + 1] - least)
    shift = max(0.0, low - moved[0]) if moved else 0.0
    result = [0.0] * len(places)
    for number, place in zip(order, moved, strict=True):
        result[number] = place + shift
    return result
