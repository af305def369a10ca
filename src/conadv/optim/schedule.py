"""Schedules: functions from the step, counted from 0, to a value such as the learning rate.

             peak ╱╲                  step            value
                 ╱  ╲ poly, cosine    0               peak / warmup (the first step is never wasted on 0)
                ╱    ╲                warmup - 1      peak
               ╱      ╲ end           steps - 1       end, and so it stays

The warm-up is a whole number of steps, and a warm-up of 0 is one of 1: the first step is at the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warmup_poly(peak: float, steps: int, warmup: int = 0, power: float = 2.0, end: float = 0.0) -> Schedule:
    """A linear warm-up to `peak`, then towards `end` as (what is left of the steps) ** power.

    Args:
        peak: the largest value, reached at the end of the warm-up.
        steps: length of the whole run, with the warm-up.
        warmup: steps of linear warm-up; 0: none.
        power: exponent of the decay; 1 is a straight line.
        end: the value at the last step and after it.
    """
    if not (math.isfinite(power) and power > 0):
        raise ValueError(f"power {power!r}: take a number above 0; 1 is a straight line, 2 the paper's curve")
    return _warmup_then(lambda progress: (1 - progress) ** power, peak, steps, warmup, end)


def warmup_cosine(peak: float, steps: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """A linear warm-up to `peak`, then half a cosine down to `end`. The arguments are those of `warmup_poly`."""
    return _warmup_then(lambda progress: (1 + math.cos(math.pi * progress)) / 2, peak, steps, warmup, end)


def warmup_constant(peak: float, warmup: int = 0) -> Schedule:
    """A linear warm-up to `peak`, which then stays. The arguments are those of `warmup_poly`."""
    return _warmup_then(lambda progress: 1.0, peak, max(warmup, 1), warmup, end=peak)


def build_schedule(decay: str, peak: float, steps: int, warmup: int, power: float, end: float) -> Schedule:
    """The schedule of a recipe, by the name of its decay. The other arguments are those of `warmup_poly`."""
    match decay:
        case "poly":
            return warmup_poly(peak, steps, warmup, power, end)
        case "cosine":
            return warmup_cosine(peak, steps, warmup, end)
        case "constant":
            return warmup_constant(peak, warmup)
    raise ValueError(f"decay {decay!r}: choose poly, cosine or constant")


def _warmup_then(decay: Callable[[float], float], peak: float, steps: int, warmup: int, end: float) -> Schedule:
    """`decay` turns the way from the peak to the last step, 0 to 1, into the share of the peak that is left."""
    if not (math.isfinite(peak) and peak > 0):
        raise ValueError(f"peak {peak!r}: take a number above 0")
    if not 0 <= end <= peak:
        raise ValueError(f"end {end!r}: take a number from 0 to the peak, {peak!r}")
    _check_whole(steps=steps, warmup=warmup)
    if not max(warmup, 1) <= steps:
        raise ValueError(
            f"a warm-up of {warmup} in {steps} steps: take at least 1 step, and no more warm-up than steps"
        )
    top = max(warmup - 1, 0)
    last = steps - 1

    def value(step: int) -> float:
        _check_whole(step=step)
        if step <= top:
            return peak * ((step + 1) / max(warmup, 1))
        share = decay((step - top) / (last - top)) if step < last else 0.0
        return peak * share + end * (1 - share)  # in this form the ends are exact

    return value


def _check_whole(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"{name} {count!r}: take a whole number from 0 up")
