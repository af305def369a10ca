"""Time candidates alternately in one process, so that a slow phase of the machine slows all of them.

round 1: A B C     round 2: B C A     round 3: C A B     ...     one ratio per round, then the median of the ratios
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TextIO, TypeVar

import torch

from conadv.parallel.collectives import own_device
from conadv.trainer.progress import ProgressBar

_Item = TypeVar("_Item")


class Lap(NamedTuple):
    """Seconds that one run took: wall time, and processor time of this process."""

    wall: float
    cpu: float


# Runs once, and returns how long it took.
Candidate = Callable[[], Lap]
Laps = dict[str, list[Lap]]
# Called after each round, including warm-up, with the number of rounds done and their total.
Tell = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Show no progress."""


def progress(label: str, stream: TextIO | None = None) -> Tell:
    """Show a progress bar for the rounds of each measurement, with the remaining seconds."""
    bar: ProgressBar | None = None
    began = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal bar, began
        now = time.monotonic()
        if bar is None:  # no thread: loaders that are measured may fork
            bar, began = ProgressBar(0, total, quiet=False, stream=stream, estimates=False).__enter__(), now
        left = f", {(now - began) / (done - 1) * (total - done):.0f} s left" if done > 1 else ""
        bar.show(done, label + left, f"round {done}/{total}", last=done == total)
        if done == total:
            bar.__exit__(None, None, None)
            bar = None

    return tell


def clock() -> Lap:
    """Read both clocks, after all work on the device of this process is done."""
    if own_device().type == "cuda":
        torch.cuda.synchronize(own_device())
    return Lap(time.perf_counter(), time.process_time())


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    prepare: Callable[[], object] = lambda: None,
    tell: Tell = silent,
    clock: Callable[[], Lap] = clock,
) -> Laps:
    """Time each candidate once per round, after `warmup` rounds that are not counted.

    `prepare` is called before each lap, and not timed.
    """

    def lap(run: Callable[[], object]) -> Lap:
        prepare()
        return time_run(run, clock)

    return in_turn({name: partial(lap, run) for name, run in runs.items()}, rounds, warmup=warmup, tell=tell)


def time_run(run: Callable[[], object], clock: Callable[[], Lap] = clock) -> Lap:
    before = clock()
    run()
    after = clock()
    return Lap(after.wall - before.wall, after.cpu - before.cpu)


def in_turn(candidates: Mapping[str, Candidate], rounds: int, *, warmup: int = 1, tell: Tell = silent) -> Laps:
    """Like `alternate`, for candidates that time themselves."""
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
    """The items rotated by some places, so that none is always first."""
    start = by % max(1, len(items))
    return [*items[start:], *items[:start]]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch off garbage collection: its time would count for whichever candidate is running."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
