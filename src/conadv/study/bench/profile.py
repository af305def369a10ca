"""Where the time of a step goes, by Python's own profiler: nothing in the code that is measured has to know of it."""

from __future__ import annotations

import cProfile
import inspect
import pstats
import time
from collections.abc import Callable

import torch

from conadv.core.learner import Learner
from conadv.core.splitbn import update_running_stats
from conadv.optim.lars import Lars
from conadv.parallel.gradients import Exchange
from conadv.parallel.handoff import RankHandoff, Wire

from .reduction import SummedAfter

PARTS = (
    "forward",
    "backward",
    "attack",
    "packing",
    "waiting for twins",
    "starting sums",
    "waiting for the exchange",
    "statistics",
    "optimizer",
    "rest",
)


def profile(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of one run, by part; together they are all of it."""
    profiler = cProfile.Profile()
    before = time.perf_counter()
    profiler.runcall(run)
    total = time.perf_counter() - before
    parts = _parts(profiler)
    return {**parts, "rest": total - sum(parts.values())}


def _parts(profiler: cProfile.Profile) -> dict[str, float]:
    within = {key: figures[3] for key, figures in pstats.Stats(profiler).stats.items()}  # type: ignore[attr-defined]

    def seconds(*functions: Callable[..., object]) -> float:
        """In these functions and all that they call."""
        return sum(float(within.get(_key(function), 0.0)) for function in functions)

    packing, sums = seconds(Wire.pack, Wire.unpack), seconds(Exchange._start_ready)
    return {
        "forward": seconds(Learner._forward),
        "backward": seconds(torch.Tensor.backward) - sums,
        "attack": seconds(Learner.attack),
        "packing": packing,
        "waiting for twins": seconds(RankHandoff.put, RankHandoff.take) - packing,
        "starting sums": sums,
        "waiting for the exchange": seconds(Exchange.finish, SummedAfter.finish),
        "statistics": seconds(update_running_stats),
        "optimizer": seconds(Lars.step),
    }


def _key(function: Callable[..., object]) -> tuple[str, int, str]:
    """The name under which the profiler knows a function, whatever wraps it."""
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno, code.co_name
