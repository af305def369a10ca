"""The memory of Ray's object store, and the references that a learner holds, over 2,000 steps with one attacker.

    PYTHONPATH=tests python tools/faults/pool_growth.py

Weights of 1.2 MB are published in each step: Ray keeps objects of more than 100 KB in its object store.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn

import conadv
from contracts.test_pool_promise import batches, started


def make_model() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 600)]
    return conadv.split_batchnorm(nn.Sequential(*layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # so that the attacker starts on a busy machine
    with conadv.ray.Pool(make_model, attackers=1, wait=60) as pool:
        ray, twins = pool._ray, 0
        started(pool)
        model = make_model()
        method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(8 / 255), delay=2, chunk_size=2, seed=3, twins=pool)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        cycle = batches(8)
        for t, (now, ahead) in enumerate(method.feed(cycle[number % 8] for number in range(steps))):
            optimizer.zero_grad()
            method(now, ahead)
            optimizer.step()
            twins += int(pool.metrics()["twins_pool"])
            if t + 1 in (10, 100, steps) or (t + 1) % 500 == 0:
                time.sleep(3)  # what Ray reports is a second or two old
                total, free = (of()["object_store_memory"] for of in (ray.cluster_resources, ray.available_resources))
                held = len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(
                    f"step {t + 1}: {(total - free) / 1e6:.2f} MB in the object store, {held} references, "
                    f"learner's peak {peak} MB, {twins} twins of the pool",
                    flush=True,
                )


if __name__ == "__main__":
    main()
