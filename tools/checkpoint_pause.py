"""How long a checkpoint keeps training waiting: in `save`, and before the next update.

python tools/checkpoint_pause.py [--megabytes 300] [--rounds 10] [--json]

A step is matrix products on one thread, as long as --seconds. Steps with and without a checkpoint take turns, since a
copy and a hash on another core also take memory bandwidth. Where other programs run, wall times say little: "processor"
is the time that the thread that trains computed within the pause, and does not count when it waited for a core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from conadv.trainer.checkpoint import Checkpoint
from conadv.trainer.saver import Saver

ABOUT: dict[str, Any] = {"recipe": {}, "versions": {}, "plain": [], "position": {"seconds": 0.0, "skipped": 0}}


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a checkpoint keeps training waiting.")
    parser.add_argument("--megabytes", type=int, default=300, help="size of the state")
    parser.add_argument("--rounds", type=int, default=10, help="steps with a checkpoint, and as many without")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a step")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = {f"weight.{number:03d}": torch.rand(250_000) for number in range(options.megabytes)}
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Saver(Path(folder), keep=1), state, options.rounds, options.seconds)
    report = {name: _summary(laps) for name, laps in rows.items()}
    print(json.dumps({"milliseconds": report}, indent=1) if options.json else _table(report))


class Lap(NamedTuple):
    """Milliseconds of one piece of work: by the clock, and of processor time of this thread."""

    wall: float
    processor: float


def measure(saver: Saver, state: dict[str, torch.Tensor], rounds: int, seconds: float) -> dict[str, list[Lap]]:
    """The time in `save`, before the update, and of products that take no notice, with a checkpoint and without."""
    rows: dict[str, list[Lap]] = {"save": [], "before update": [], "step with": [], "step without": []}
    saver.save(0, Checkpoint(state, ABOUT), before=lambda: None)  # asks for memory
    saver.wait()
    products = _count(seconds)
    for step in range(1, rounds + 1):
        rows["save"].append(_timed(lambda step=step: saver.save(step, Checkpoint(state, ABOUT), before=lambda: None)))
        rows["step with"].append(_timed(lambda: _compute(products)))
        rows["before update"].append(_timed(saver.before_update))
        saver.wait()
        rows["step without"].append(_timed(lambda: _compute(products)))
    saver.close()
    return rows


def _compute(products: int) -> None:
    matrix = torch.rand(256, 256)
    for _ in range(products):
        matrix @ matrix


def _count(seconds: float) -> int:
    """How many products take so long."""
    return max(1, int(200 * seconds / (_timed(lambda: _compute(200)).wall / 1000)))


def _timed(work: Any) -> Lap:
    wall, processor = time.perf_counter(), time.thread_time()
    work()
    return Lap(1000 * (time.perf_counter() - wall), 1000 * (time.thread_time() - processor))


def _summary(laps: list[Lap]) -> dict[str, float]:
    walls, processor = [lap.wall for lap in laps], [lap.processor for lap in laps]
    wall = {"median": statistics.median(walls), "smallest": min(walls), "largest": max(walls)}
    return {**wall, "processor": statistics.median(processor)}


def _table(report: dict[str, dict[str, float]]) -> str:
    heads = ("median", "smallest", "largest", "processor")
    rows = [f"{name:14}" + "".join(f"{row[head]:10.1f}" for head in heads) for name, row in report.items()]
    return "\n".join(["ms            " + "".join(f"{head:>10}" for head in heads), *rows])


if __name__ == "__main__":
    main()
