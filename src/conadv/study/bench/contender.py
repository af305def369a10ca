"""A contender: a method in a layout, and what one rank does for it in a step.

together  on all ranks, as in a run
beside    on each rank for itself: what the cores cost each other
alone     on the first rank, while the others sleep
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conadv.core.handoff import Handoff, Twin
from conadv.core.roles import Place, Role
from conadv.core.splitbn import update_running_stats
from conadv.optim.groups import parameter_groups
from conadv.optim.lars import Lars
from conadv.parallel.collectives import World
from conadv.parallel.gradients import Exchange
from conadv.parallel.handoff import RankHandoff, Wire, between_ranks
from conadv.parallel.layout import Layout

from .reduction import Averaged, Reduction, SummedAfter
from .workload import Workload, delay_of, duties_of


@dataclass(frozen=True)
class Contender:
    """What a block of steps does on all ranks."""

    name: str
    method: str
    layout: str | None = None
    """None: all duties on each rank."""
    ranks: Literal["together", "beside", "alone"] = "together"
    reduction: Literal["overlapped", "after", "ddp"] = "overlapped"
    """Sums that start in the backward pass, one sum after it, or DistributedDataParallel."""


@dataclass(frozen=True)
class Share:
    """What one rank does for a contender: a step to take, and messages to wait for at the end."""

    step: Callable[[], None]
    handoff: RankHandoff | None = None


def build_share(contender: Contender, workload: Workload, world: World, steps: int) -> Share | None:
    """The part of this rank in so many steps of a contender; None: it sleeps."""
    if contender.ranks == "alone" and not world.is_main:
        return None
    if contender.ranks != "together":
        world = World(0, 1, world.device)
    layout = Layout.fit(contender.layout, duties_of(contender.method), world.size)
    place = layout.place(world.rank, layout.lanes)
    handoff = between_ranks(layout, world, place, delay_of(contender.method), steps, wire(workload))
    model = workload.build(contender.method)
    reduction: Reduction
    match contender.reduction:
        case "overlapped":
            reduction = Exchange(model, world, place.share)
        case "after":
            reduction = SummedAfter(model, world)
        case "ddp":
            # It takes the mean over the ranks, so that none has a smaller share.
            place = replace(place, share=1.0)
            reduction = Averaged(model)
            with warnings.catch_warnings():  # the newer name of the flag is not in every version that we allow
                warnings.simplefilter("ignore", FutureWarning)
                model = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    return Share(_step(workload, contender.method, model, place, handoff, reduction), handoff)


def role_alone(method: str, layout: Layout, rank: int, workload: Workload) -> Callable[[], None]:
    """What one rank of a lane does in a step, in a process of its own that exchanges nothing."""
    place = layout.place(rank, layout.lanes)
    model = workload.build(method)
    handoff = None if layout.route(rank) is None else Echo(wire(workload), workload)
    return _step(workload, method, model, place, handoff, Exchange(model, _no_others(), place.share))


def wire(workload: Workload) -> Wire:
    """As bytes, since nothing starts between them."""
    return Wire(workload.chunk_size, workload.shape, torch.float32, as_bytes=True)


class Echo:
    """A hand-off without another side: packs what it is given, unpacks a message that it always has."""

    def __init__(self, wire: Wire, workload: Workload) -> None:
        self._wire = wire
        self._message = wire.pack(Twin(*workload.pixels()))

    def put(self, twin: Twin) -> None:
        self._wire.pack(twin)

    def take(self) -> Twin:
        return self._wire.unpack(self._message)

    def clear(self) -> None:
        """Nothing is ever in flight."""


def _step(
    workload: Workload, name: str, model: nn.Module, place: Place, handoff: Handoff | None, reduction: Reduction
) -> Callable[[], None]:
    """A step as `conadv train` takes it, with a learning rate of 0, so that every round does the same work."""
    method = workload.method(name, model, place=place, handoff=handoff)
    optimizer = Lars(parameter_groups(model, 5e-4), lr=0.0)
    sees_data = place.role & (Role.CLEAN | Role.ATTACK)
    pairs = method.feed(repeat(workload.batch(place.first_chunk) if sees_data else None))

    def step() -> None:
        now, ahead = next(pairs)
        reduction.zero_grad()
        reduction.finish(method(now, ahead))
        update_running_stats(model)
        optimizer.step()

    return step


def _no_others() -> World:
    return World(0, 1, torch.device("cpu"))
