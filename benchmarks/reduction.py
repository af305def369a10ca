"""Our all_reduce of gradients against one sum after the backward pass, and against DistributedDataParallel.

python benchmarks/reduction.py --json
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conadv.core.batchnorm.splitbn import pending_statistics
from conadv.core.catalog import METHODS
from conadv.core.parts import Losses
from conadv.parallel.collectives import World
from conadv.parallel.gradients import Exchange
from conadv.parallel.layout import Layout
from conadv.study.bench.alternate import Tell
from conadv.study.bench.command import Measurement
from conadv.study.bench.contender import Share, build_step, take_turns
from conadv.study.bench.layout import ratio
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.result import Findings
from conadv.study.bench.workload import Workload
from scripts import run_workload

RANKS = 2


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Time of a step of vanilla on 2 ranks, by each way to sum gradients, divided by ours."""
    (found,) = run_ranks(["reduction:on_rank"], RANKS, workload, rounds)
    ours = f"vanilla-{RANKS}"
    names = (f"{ours}-after", f"{ours}-ddp")
    notes = ["-after: one sum after the backward pass; -ddp: DistributedDataParallel, which sums gradients alone"]
    return Findings([ratio(found["wall"], name, ours, composed=False) for name in names], notes)


def on_rank(workload: Workload, rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Seconds per step on this rank and the others."""
    place = Layout.fit(None, METHODS["vanilla"].duties, world.size).place(world.rank, world.size)
    model = workload.build("vanilla")
    shares = {
        f"vanilla-{world.size}": build_step(workload, "vanilla", model, place, Exchange(model, world, place.share))
    }
    model = workload.build("vanilla")
    shares[f"vanilla-{world.size}-after"] = build_step(workload, "vanilla", model, place, SummedAfter(model, world))
    model = workload.build("vanilla")
    reduction = Averaged(model)
    with warnings.catch_warnings():  # the newer name of the flag is not in every version that we allow
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    # It takes the mean over the ranks, so that none has a smaller share.
    step = build_step(workload, "vanilla", wrapped, replace(place, share=1.0), reduction)
    shares[f"vanilla-{world.size}-ddp"] = step
    return take_turns({name: Share(step) for name, step in shares.items()}, rounds, world)


class SummedAfter:
    """Everything in one sum, after the backward pass."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._statistics = pending_statistics(model)
        parameters = list(model.parameters())
        sizes = [*map(Tensor.numel, parameters), *map(Tensor.numel, self._statistics), 2]
        self._all = torch.zeros(sum(sizes), device=world.device)
        *gradients, self._losses = self._all.split(sizes)
        self._shared = gradients[len(parameters) :]
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())

    def zero_grad(self) -> None:
        self._all.zero_()

    def finish(self, losses: Losses) -> object:
        torch._foreach_copy_(self._shared, self._statistics)
        self._losses.copy_(torch.stack([*losses]))
        self._world.all_reduce(self._all)
        torch._foreach_copy_(self._statistics, self._shared)
        return bool(self._all.sum().isfinite())


class Averaged:
    """DistributedDataParallel, which sums gradients in the backward pass, and neither statistics nor losses."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def finish(self, losses: Losses) -> object:
        return bool(torch.stack([*losses]).isfinite().all())


if __name__ == "__main__":
    run_workload("reduction", Measurement(measure, Workload(), 5, one_core=False), __doc__)
