"""Where the time of a step goes on each rank, by Python's own profiler.

    python benchmarks/step_parts.py

On a GPU it shows where the process waits, not what the device does.
"""

from __future__ import annotations

import cProfile
import inspect
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch

from conadv.core.batchnorm.splitbn import update_running_stats
from conadv.core.catalog import METHODS
from conadv.core.learner import Learner
from conadv.optim.lars import Lars
from conadv.parallel.collectives import World
from conadv.parallel.gradients import Exchange
from conadv.parallel.handoff import RankHandoff, Wire
from conadv.parallel.layout import Layout
from conadv.study.bench.contender import STEPS, Contender, Share, build_share, gathered
from conadv.study.bench.layout import contenders
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.result import columns
from conadv.study.bench.workload import Workload
from scripts import run_script

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


def main(
    *,
    ranks: int = 2,
    model: str = "resnet20",
    width: int | None = None,
    chunk_size: int = 64,
    image_size: int = 32,
) -> None:
    """Profile three steps of each method whose lane has so many ranks, and of vanilla."""
    (rows,) = run_ranks(["step_parts:on_rank"], ranks, Workload(model, width, chunk_size, image_size), 0)
    parts = [part for part in PARTS if any(row["seconds"][part] for row in rows)]
    cells = [[f"{1e3 * row['seconds'][part]:.1f}" for part in parts] for row in rows]
    lines = [(row["name"], row["place"], *texts) for row, texts in zip(rows, cells, strict=True)]
    print(columns([("ms per step", "on", *parts), *lines]))


def on_rank(workload: Workload, rounds: int, world: World) -> list[dict[str, Any]]:
    """One row for each contender and each rank that has a part in it."""
    found = contenders(world.size)
    own = []
    for contender in found:
        share = build_share(contender, workload, world, 1 + STEPS)
        world.barrier()
        own.append(_profile_block(share))
        if share is not None and share.handoff is not None:
            share.handoff.drain()
    seconds = gathered(torch.tensor(own, dtype=torch.float64), world)
    return [
        {
            "name": one.name,
            "place": _place(one, rank, world),
            "seconds": dict(zip(PARTS, parts, strict=True)),
        }
        for number, one in enumerate(found)
        for rank, parts in enumerate(seconds[:, number].tolist())
        if any(parts)
    ]


def _profile_block(share: Share | None) -> list[float]:
    if share is None:
        return [0.0] * len(PARTS)
    share.step()
    seconds = profile(lambda: [share.step() for _ in range(STEPS)])
    return [seconds[part] / STEPS for part in PARTS]


def _place(contender: Contender, rank: int, world: World) -> str:
    if contender.ranks != "together":
        return f"rank {rank}"
    return Layout.fit(contender.layout, METHODS[contender.method].duties, world.size).describe(rank)


def profile(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of one run, by part; the parts add up to all of it."""
    profiler = cProfile.Profile()
    before = time.perf_counter()
    profiler.runcall(run)
    total = time.perf_counter() - before
    parts = _parts(profiler)
    return {**parts, "rest": total - sum(parts.values())}


def _parts(profiler: cProfile.Profile) -> dict[str, float]:
    within = {key: figures[3] for key, figures in pstats.Stats(profiler).stats.items()}

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
        "waiting for the exchange": seconds(Exchange.finish),
        "statistics": seconds(update_running_stats),
        "optimizer": seconds(Lars.step),
    }


def _key(function: Callable[..., object]) -> tuple[str, int, str]:
    """The profiler's name for a function, behind its decorators."""
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno, code.co_name


if __name__ == "__main__":
    run_script(main)
