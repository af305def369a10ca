"""The time of vanilla steps whose gradients DistributedDataParallel averages, against one sum after the backward pass.

    python benchmarks/ddp.py --ranks 2 --rounds 20

The script starts its ranks with torchrun. Both candidates alternate in one run, on the same images. Wall time of rank
0, since ranks wait for each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import conadv
from alternate import alternate, arguments, compare, report
from step import Step, chunk, network, sgd


def main() -> None:
    given = arguments(
        __doc__ or "", ranks=2, rounds=10, lap=5, model="resnet20", width=16, chunks=2, chunk_size=64, image_size=32
    )
    if "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        raise SystemExit(subprocess.call([sys.executable, *launcher, *sys.argv], env=environment))
    torch.set_num_threads(1)
    batch = chunk(given.chunks * given.chunk_size, given.image_size)
    size = given.ranks * given.chunks * given.chunk_size
    with conadv.Team(batch_size=size, chunk_size=given.chunk_size) as team:
        runs = {}
        for name in ("ddp", "sum"):
            model = conadv.split_batchnorm(network(given.model, given.width), ("main",))
            method: Callable[..., object] = conadv.Vanilla(model, F.cross_entropy, chunk_size=given.chunk_size, seed=0)
            if name == "ddp":
                method = team.method(conadv.Vanilla, model, F.cross_entropy)
            runs[name] = laps_of(model, method, batch, given.lap, sums=name == "sum")
        times = alternate(runs, given.rounds, prepare=team.world.barrier, clock=time.perf_counter)
        if team.world.is_main:
            report([compare(times, "ddp", "sum")], given.json, ranks=given.ranks, chunks=given.chunks)


def laps_of(model: torch.nn.Module, method: Callable[..., object], batch: object, lap: int, sums: bool) -> Step:
    """Some steps, perhaps with one all_reduce of all gradients."""
    optimizer = sgd(model)

    def run() -> None:
        for _ in range(lap):
            optimizer.zero_grad()
            method(batch)
            if sums:
                gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
                total = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(total)
                parts = total.div_(dist.get_world_size()).split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
