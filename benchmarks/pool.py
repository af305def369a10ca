"""The time of ConAdv steps of a learner with one attacker in a pool, against the same alone; needs two free cores.

    python benchmarks/pool.py --chunks 4 --chunk-size 64 --rounds 20

Wall time: the attacker is another process. By work the ratio is 6/8, since the attack is two of the eight passes of a
step. The twins of the first step of a lap were made during the lap before, which favours the pool, so laps are long.
The twins of all rounds are counted by where they came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import conadv
from alternate import alternate, arguments, compare, one_core, report
from conadv.ray import Pool
from step import ATTACK, chunk, network, sgd


def make_model(model: str, width: int) -> nn.Module:
    return conadv.split_batchnorm(network(model, width))


def learner(model: str, width: int, chunk_size: int, batch: object, pool: Pool | None) -> Callable[[], object]:
    """A step that also shows the next batch, which is the same one."""
    split = make_model(model, width)
    method = conadv.ConAdv(split, F.cross_entropy, ATTACK, chunk_size=chunk_size, seed=0, twins=pool)
    optimizer = sgd(split)

    def step() -> None:
        optimizer.zero_grad()
        method(batch, batch if pool is not None else None)
        optimizer.step()

    return step


def main() -> None:
    given = arguments(
        __doc__ or "", rounds=10, lap=10, model="resnet20", width=16, chunks=4, chunk_size=64, image_size=32
    )
    batch = chunk(given.chunks * given.chunk_size, given.image_size)
    torch.set_num_threads(1)
    model, width = given.model, given.width
    sources = {"pool": 0, "here": 0}
    with Pool(partial(make_model, model, width), attackers=1, wait=60) as pool:
        steps = {
            "pool": learner(model, width, given.chunk_size, batch, pool),
            "alone": learner(model, width, given.chunk_size, batch, None),
        }
        while not pool.metrics()["attackers"]:
            time.sleep(0.1)

        def with_pool() -> None:
            for _ in range(given.lap):
                steps["pool"]()
                for name in sources:
                    sources[name] += int(pool.metrics()[f"twins_{name}"])

        def alone() -> None:
            for _ in range(given.lap):
                steps["alone"]()

        with one_core():
            laps = alternate({"pool": with_pool, "alone": alone}, given.rounds, clock=time.perf_counter)
    report([compare(laps, "pool", "alone")], given.json, chunks=given.chunks, **sources)


if __name__ == "__main__":
    main()
