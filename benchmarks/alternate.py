"""Time candidates alternately in one process, so that a slow phase of the machine slows all of them.

round 1: A B C     round 2: B C A     round 3: C A B     ...     one ratio per round, then the median of the ratios
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binom

Seconds = dict[str, list[float]]
"""The time of each candidate, one number per round."""


class Ratio(NamedTuple):
    """The median over the rounds of the ratio of two times, and how sure it is."""

    name: str
    median: float
    low: float
    """10th percentile of the rounds."""
    high: float
    """90th percentile."""
    median_low: float
    """With `median_high`: a 95 % interval of the median that assumes no distribution; less below 6 rounds."""
    median_high: float
    rounds: int


def alternate(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> Seconds:
    """Time each candidate once per round, after one round of warm-up.

    Args:
        runs: what to time, by name.
        rounds: how often.
        prepare: called before each lap, and not timed.
        clock: None: processor time of this process, which leaves out other users of the core; wall time on a GPU.
    """
    clock = clock or work_clock
    laps: Seconds = {name: [] for name in runs}
    with _no_garbage_collection():
        for number in range(1 + rounds):
            start = number % len(runs)
            for name in [*runs, *runs][start : start + len(runs)]:
                prepare()
                before = clock()
                runs[name]()
                laps[name] += [clock() - before] if number else []
            print(f"\rround {number}/{rounds}", end="" if number < rounds else "\n", file=sys.stderr, flush=True)
    return laps


def work_clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def compare(laps: Seconds, first: str, second: str) -> Ratio:
    """The ratio of two candidates, taken round by round."""
    ratios = sorted(above / below for above, below in zip(laps[first], laps[second], strict=True))
    low, median, high = np.percentile(ratios, [10, 50, 90]).tolist()
    rank = max(1, int(binom.ppf(0.025, len(ratios), 0.5)))  # so many values are below the interval at the most
    return Ratio(f"{first}/{second}", median, low, high, ratios[rank - 1], ratios[-rank], len(ratios))


def arguments(text: str, **defaults: Any) -> argparse.Namespace:
    """Flags of a script: one for each default, as a whole number or a text, and --json."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind = _whole if isinstance(default, int) else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"(default: {default})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def report(ratios: Sequence[Ratio], as_json: bool, **facts: Any) -> None:
    """Print ratios and the facts that they depend on."""
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "load": os.getloadavg()[0], **facts}
    if as_json:
        print(json.dumps({"facts": facts, "ratios": [ratio._asdict() for ratio in ratios]}, default=str))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'ratio of times':32} {'median':>7} {'10 %':>7} {'90 %':>7}   median within      n")
    for name, median, low, high, median_low, median_high, rounds in ratios:
        print(f"{name:32} {median:7.3f} {low:7.3f} {high:7.3f}   {median_low:.3f} to {median_high:.3f} {rounds:6}")


@contextmanager
def one_core() -> Iterator[None]:
    """Run with one thread on the last core (Linux), because the first one serves most interrupts."""
    threads, cores = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[-1:])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Its time would count for whichever candidate is running."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
