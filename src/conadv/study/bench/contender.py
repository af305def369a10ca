"""Contenders: methods in layouts, timed alternately on the same ranks, one block of steps at a time.

There is a barrier between blocks, where a rank that takes no part in a block waits. The first step of a block is not
timed; after it, twins are in flight as in a run.

together  on all ranks, as in a run
beside    on each rank independently: how much the cores slow each other down
alone     on rank 0, while the others sleep
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal

import torch
from torch import nn

from conadv.core.batchnorm.splitbn import update_running_stats
from conadv.core.catalog import METHODS
from conadv.core.handoff import Handoff
from conadv.core.roles import Place, Role
from conadv.core.share import TwinShare
from conadv.optim.groups import parameter_groups
from conadv.optim.lars import Lars
from conadv.parallel.collectives import World
from conadv.parallel.gradients import Exchange
from conadv.parallel.handoff import RankHandoff, between_ranks
from conadv.parallel.layout import Layout
from conadv.parallel.recipients import recipients
from conadv.parallel.traffic import Traffic
from conadv.parallel.wire import Wire

from .alternate import Candidate, Lap, Laps, in_turn, progress, silent, time_run
from .result import wall_time, work_time
from .workload import Workload

STEPS = 3
"""Timed steps per block."""
_WARMUP = 1


@dataclass(frozen=True)
class Contender:
    """A method in a layout, and which ranks run it."""

    name: str
    method: str
    layout: str | None = None
    """None: all duties on each rank."""
    ranks: Literal["together", "beside", "alone"] = "together"
    chunks: int = 1
    """Chunks per lane."""
    share: str = "1"
    """The share of the chunks that have twins."""

    @property
    def lane(self) -> Layout:
        return Layout.lane_of(self.layout or "clean", METHODS[self.method].duties)


@dataclass(frozen=True)
class Share:
    """What one rank does for a contender: its step, and a hand-off to drain at the end."""

    step: Callable[[], None]
    handoff: RankHandoff | None = None


def block_steps(rounds: int) -> int:
    """Total number of steps of a contender."""
    return (_WARMUP + rounds) * (1 + STEPS)


def take_turns(shares: Mapping[str, Share | None], rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Seconds per step of the slowest rank, by contender and round, as wall time ("wall") and CPU time ("work")."""
    tell = progress(f"layout on {world.size} ranks") if world.is_main else silent
    blocks = {name: _block(share, world) for name, share in shares.items()}
    laps = in_turn(blocks, rounds, warmup=_WARMUP, tell=tell)
    for share in shares.values():
        if share is not None and share.handoff is not None:
            share.handoff.drain()
    return {
        name: {contender: (seconds / STEPS).tolist() for contender, seconds in slowest(laps, world, by).items()}
        for name, by in (("wall", wall_time), ("work", work_time))
    }


def build_share(contender: Contender, workload: Workload, world: World, steps: int) -> Share | None:
    """What this rank does in `steps` steps of a contender; None: nothing."""
    if contender.ranks == "alone" and not world.is_main:
        return None
    if contender.ranks != "together":
        world = World(0, 1, world.device)
    method = METHODS[contender.method]
    layout = Layout.fit(contender.layout, method.duties, world.size)
    chunks = layout.lanes * contender.chunks
    place = layout.place(world.rank, chunks)
    has_twins = partial(TwinShare.from_number(contender.share).has, 0)
    traffic = Traffic(layout, world.rank, chunks, method.default_delay, has_twins)
    handoff = between_ranks(traffic, world, wire(workload))
    if handoff is not None:
        handoff.announce(0, steps)
    model = workload.build(method.name)
    exchange = Exchange(model, world, place.share, recipients(layout, world, layout.ahead(method.default_delay)))
    step = build_step(workload, method.name, model, place, exchange, handoff, contender.share)
    return Share(step, handoff)


def build_step(
    workload: Workload,
    name: str,
    model: nn.Module,
    place: Place,
    exchange: Exchange,
    handoff: Handoff | None = None,
    share: str = "1",
) -> Callable[[], None]:
    """A step as `conadv train` takes it, with a learning rate of 0, so that every round does the same work."""
    method = workload.method(name, model, place=place, handoff=handoff, twin_share=share)
    optimizer = Lars(parameter_groups(model, 5e-4), lr=0.0)
    sees_data = place.role & (Role.CLEAN | Role.ATTACK)
    pairs = iter(method.feed(repeat(workload.batch(place.first_chunk, place.chunks or 1) if sees_data else None)))

    def step() -> None:
        now, ahead = next(pairs)
        exchange.zero_grad()
        losses = method(now, ahead)
        if isinstance(handoff, RankHandoff):
            exchange.start()
            handoff.end_step()
        exchange.finish(losses)
        update_running_stats(model)
        optimizer.step()

    return step


def repeated(step: Callable[[], None], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            step()

    return run


def wire(workload: Workload) -> Wire:
    """Twins as bytes, which is exact because no attack has a random start."""
    return Wire(workload.chunk_size, workload.shape, torch.float32, as_bytes=True)


def slowest(laps: Laps, world: World, clock: Callable[[Lap], float]) -> dict[str, torch.Tensor]:
    """Seconds of the slowest rank, by round."""
    own = torch.tensor([list(map(clock, rounds)) for rounds in laps.values()], dtype=torch.float64)
    return dict(zip(laps, gathered(own, world).amax(dim=0), strict=True))


def _block(share: Share | None, world: World) -> Candidate:
    def run() -> Lap:
        world.barrier()
        if share is None:
            return Lap(0.0, 0.0)
        share.step()
        return time_run(repeated(share.step, STEPS))

    return run


def gathered(own: torch.Tensor, world: World) -> torch.Tensor:
    """The tensors of all ranks, stacked: an all_reduce in which the other ranks contribute zeros."""
    everyone = own.new_zeros((world.size, *own.shape), device=world.device)
    everyone[world.rank] = own
    return world.all_reduce(everyone).cpu()
