"""Kill and start attackers of a pool at random in many short runs; each must end with the weights of one process.

    PYTHONPATH=tests python tools/faults/pool_kills.py --runs 60 --seed 5000

The runs are those of tests/contracts/test_pool_promise.py: 0 to 3 attackers at first, delays 1 to 3, 1 and 4 chunks.
With --learners 2, two ranks of DistributedDataParallel have 3 attackers at first.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import Counter

import torch

import conadv
from contracts.test_pool_promise import learners_with_losses, make_model, with_losses
from support.ranks import Pool as Ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=5000, help="of the first run; the next ones count up")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learners", type=int, default=1, choices=(1, 2))
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # so that attackers start on a busy machine
    seeds = range(given.seed, given.seed + given.runs)
    if given.learners == 1:
        _disturb_one(seeds, given.steps)
    else:
        _disturb_two(seeds, given.steps)


def _disturb_one(seeds: range, steps: int) -> None:
    total: Counter[str] = Counter()
    with conadv.ray.Pool(make_model(), attackers=0):  # keeps Ray up for all runs
        for seed in seeds:
            chance = random.Random(seed)
            settings = {"delay": chance.choice([1, 2, 3]), "chunk_size": chance.choice([8, 2])}
            attackers = chance.choice([0, 1, 2, 3, 3])
            total += with_losses(seed, attackers, steps, **settings) + Counter(runs=1)
            print(f"{seed}: {attackers} attackers, {settings}; in all {dict(total)}", flush=True)


def _disturb_two(seeds: range, steps: int) -> None:
    total: Counter[str] = Counter()
    ranks = Ranks(2)
    try:
        for seed in seeds:
            total += sum(learners_with_losses(ranks, seed, steps), Counter(runs=1))
            print(f"{seed}: 2 learners; in all {dict(total)}", flush=True)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
