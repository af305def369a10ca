"""`--diagnose`: measure the staleness of a step's twins; all ranks share the work."""

from __future__ import annotations

import torch

from conadv.core.conadv import ConAdv
from conadv.core.recycled import Recycled

from .build import Job


def diagnose(job: Job, step: int) -> dict[str, float]:
    """Return the metrics of staleness (`core/staleness.py`) of a step, before its update; every rank must call it.

    They do not depend on the layout, since the stream can give any chunk to any rank.
    """
    assert isinstance(job.method, ConAdv | Recycled)
    staleness, world, count = job.method.staleness(), job.world, job.stream.chunks_per_step
    batch = staleness.batch_of(step)
    mine = range(count * world.rank // world.size, count * (world.rank + 1) // world.size)
    chunks = ((number - job.place.first_chunk, job.stream.chunk(batch, number)) for number in mine)
    sums = staleness.measure(chunks, step, job.stale)
    farthest = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    farthest[world.rank : world.rank + 1] = sums.farthest
    for tensor in (sums.numbers, farthest, sums.gradient, sums.error):
        world.all_reduce(tensor)
    sums.farthest = farthest.max()
    return sums.metrics(staleness.drift(job.stale))
