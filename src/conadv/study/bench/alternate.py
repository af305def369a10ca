"""Candidates timed in turn within one process, so that whatever slows the machine for a while slows them all.

round 1: A B C     round 2: B C A     round 3: C A B     ...     a ratio a round, then the median of the ratios
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

_Item = TypeVar("_Item")


class Lap(NamedTuple):
    """Seconds that one run took: on the clock on the wall, and of this process' work."""

    wall: float
    cpu: float


# Runs once, and says how long it took.
Candidate = Callable[[], Lap]
Laps = dict[str, list[Lap]]
# Told after each round, warm-up included: how many are done, and of how many.
Tell = Callable[[int, int], None]


def read_clock() -> Lap:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what was started on a device belongs to the lap
    return Lap(time.perf_counter(), time.process_time())


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    prepare: Callable[[], object] = lambda: None,
    tell: Tell = lambda done, total: None,
    clock: Callable[[], Lap] = read_clock,
) -> Laps:
    """Time each run once a round; the laps of each, without those of the first `warmup` rounds.

    prepare: what puts things in order before each lap, and is not timed.
    """

    def candidate(run: Callable[[], object]) -> Candidate:
        def lap() -> Lap:
            prepare()
            return time_run(run, clock)

        return lap

    return in_turn({name: candidate(run) for name, run in runs.items()}, rounds, warmup=warmup, tell=tell)


def time_run(run: Callable[[], object], clock: Callable[[], Lap] = read_clock) -> Lap:
    before = clock()
    run()
    after = clock()
    return Lap(after.wall - before.wall, after.cpu - before.cpu)


def in_turn(
    candidates: Mapping[str, Candidate], rounds: int, *, warmup: int = 1, tell: Tell = lambda done, total: None
) -> Laps:
    """The same for candidates that time themselves."""
    laps: Laps = {name: [] for name in candidates}
    with _no_garbage_collection():
        for number in range(warmup + rounds):
            for name in rotated(list(candidates), number):
                lap = candidates[name]()
                if number >= warmup:
                    laps[name].append(lap)
            tell(number + 1, warmup + rounds)
    return laps


def rotated(items: Sequence[_Item], by: int) -> list[_Item]:
    """The items in their order, beginning with another one: none is always first, or always after a pause."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection would be charged to whoever runs when it comes."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
