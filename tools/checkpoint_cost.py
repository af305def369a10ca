"""What a checkpoint every 50 steps costs, written beside the training or before it goes on.

python tools/checkpoint_cost.py [--blocks 40] [--every 50] [--field KEY=VALUE ...]

Short blocks of steps with and without a checkpoint take turns, so that a machine whose speed drifts treats them alike.
What a block with one takes longer, over the time of `--every` steps, is the cost.

For example on a quiet machine:  --field model=resnet20 --field batch_size=32 --field chunk_size=32 --field threads=1
                                 --field data.name=synthetic --field data.train_size=1280
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conadv.config import load_recipe
from conadv.ranks.collectives import joined, own_device
from conadv.trainer.build import Job, build_job, build_stream, check_fit
from conadv.trainer.build_task import build_task
from conadv.trainer.checkpoint import Checkpoint
from conadv.trainer.loop import _apply
from conadv.trainer.saver import Saver
from conadv.trainer.state import gather

WAYS = ("none", "background", "foreground")
BLOCK = 5  # steps, long enough that what is written in the background is written by their end


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint every 50 steps costs.")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of each way")
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--field", action="append", default=[], metavar="KEY=VALUE", help="a field of the recipe")
    options = parser.parse_args()
    fields = {"epochs": "100000", **dict(text.split("=", 1) for text in options.field)}
    recipe = load_recipe("digits", fields)
    task = build_task(recipe, own_device())
    stream = build_stream(recipe, task)
    with joined(recipe.timeout) as world, tempfile.TemporaryDirectory() as folder:
        job = build_job(recipe, task, stream, check_fit(recipe, 1), world, start=0)
        saver = Saver(Path(folder), keep=2)
        steps = take_steps(job)
        seconds = measure(lambda way: block(way, steps, job, saver), options.blocks)
        saver.close()
        size = sum(path.stat().st_size for path in max(Path(folder).glob("step-*")).iterdir())
    print(json.dumps({"fields": fields, "bytes": size, "results": costs(seconds, options.every)}, indent=1))


def take_steps(job: Job) -> Iterator[int]:
    """A training that goes on by one step each time it is asked; it gives the number of steps taken."""
    for number, (now, ahead) in enumerate(job.method.feed(job.batches(0)), 1):
        outcome = job.member.step(now, ahead).read()
        job.stale.keep()
        assert outcome.culprits is None
        _apply(job, 0.01)
        yield number


def block(way: str, steps: Iterator[int], job: Job, saver: Saver) -> float:
    """The seconds of a few steps that begin with a checkpoint, or without one."""
    began = time.perf_counter()
    number = next(steps)
    if way != "none":
        about = {"recipe": {}, "versions": {}, "plain": [], "position": {"seconds": 0.0, "skipped": 0}}
        saver.save(
            number, Checkpoint(gather(job.task.model, job.optimizer, job.stale, job.ema), about), before=lambda: None
        )
    if way == "foreground":
        saver.wait()
    for _ in range(BLOCK - 1):
        next(steps)
    saver.wait()
    return time.perf_counter() - began


def measure(run: Callable[[str], float], blocks: int) -> dict[str, list[float]]:
    """Seconds by way; ways take turns, each block in another order, after one that warms up."""
    run("none")
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(blocks):
        for place in range(len(WAYS)):
            way = WAYS[(number + place) % len(WAYS)]
            seconds[way].append(run(way))
    return seconds


def costs(seconds: dict[str, list[float]], every: int) -> list[dict[str, Any]]:
    """The time of `every` steps with a checkpoint over that without, from what a block with one takes longer."""
    apart = every / BLOCK * statistics.median(seconds["none"])
    rows = []
    for way in WAYS[1:]:
        longer = [one - other for one, other in zip(seconds[way], seconds["none"], strict=True)]
        low, *_, median, _, _, _, high = statistics.quantiles([1 + seconds / apart for seconds in longer], n=10)
        rows.append({"name": f"{way}/none", "ratio": median, "low": low, "high": high, "n": len(longer)})
    return rows


if __name__ == "__main__":
    main()
