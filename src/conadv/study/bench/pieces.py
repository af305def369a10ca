"""The pieces that a step is put together from where ranks outnumber cores: each rank's work, and what goes between."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conadv.core.handoff import Twin
from conadv.core.learner import Losses
from conadv.parallel.collectives import World
from conadv.parallel.gradients import Exchange
from conadv.parallel.handoff import between_ranks
from conadv.parallel.layout import Layout

from .alternate import Candidate, Lap, Tell, alternate, in_turn, time_run
from .contender import role_alone, wire
from .progress import progress
from .result import wall_time, work_time
from .together import LAYOUTS, lane_width, slowest
from .workload import Workload, duties_of

_WARMUP = 2
# Exchanges and hand-offs are short: so many make a lap.
_REPEATS = 10


def roles_alone(workload: Workload, rounds: int, tell: Tell) -> dict[str, list[list[float]]]:
    """Seconds a step of each rank of a lane, by method: rank by rank, a figure a round. In this process."""
    layouts = {method: _lanes(method, width) for method, width in _widths().items()}
    runs = {
        f"{method} {rank}": role_alone(method, layout, rank, workload)
        for method, layout in layouts.items()
        for rank in range(layout.world_size)
    }
    laps = alternate(runs, rounds, warmup=_WARMUP, tell=tell)
    return {
        method: [list(map(work_time, laps[f"{method} {rank}"])) for rank in range(layout.world_size)]
        for method, layout in layouts.items()
    }


def exchange(workload: Workload, rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Seconds that the sums of a step take, and a twin on its way, by method: those that fill these ranks."""
    methods = ["vanilla", *(method for method, width in _widths().items() if width == world.size)]
    candidates: dict[str, Candidate] = {}
    for method in methods:
        messages = (_WARMUP + rounds) * _REPEATS
        candidates[f"{method} sums"] = _lap(_exchange(workload, method, world), world)
        candidates[f"{method} no sums"] = _lap(_exchange(workload, method, World(0, 1, world.device)), world)
        candidates[f"{method} hand-off"] = _lap(_handover(workload, method, world, messages), world)
    tell = progress(f"exchange of {world.size} ranks") if world.is_main else lambda done, total: None
    seconds = slowest(in_turn(candidates, rounds, warmup=_WARMUP, tell=tell), world, wall_time)
    return {
        method: {
            # What every rank does for itself is part of its own work.
            "exchange": (seconds[f"{method} sums"] - seconds[f"{method} no sums"]).clamp(min=0).tolist(),
            "hand-off": seconds[f"{method} hand-off"].tolist(),
        }
        for method in methods
    }


def _lanes(method: str, size: int) -> Layout:
    return Layout.fit(LAYOUTS.get(method), duties_of(method), size)


def _widths() -> dict[str, int]:
    """Ranks a lane, by method."""
    return {"vanilla": 1} | {method: lane_width(layout) for method, layout in LAYOUTS.items()}


def _exchange(workload: Workload, method: str, world: World) -> Callable[[], object]:
    """The exchange of a step that brought no gradient."""
    model = workload.build(method)
    exchange = Exchange(model, world, 1.0)
    losses = Losses(torch.zeros(()), torch.zeros(()))

    def run() -> None:
        exchange.zero_grad()
        exchange.finish(losses)

    return run


def _handover(workload: Workload, method: str, world: World, messages: int) -> Callable[[], object]:
    """What this rank does to bring one twin from the rank that makes it to the rank that takes it."""
    layout = _lanes(method, world.size)
    route = layout.route(world.rank)
    handoff = between_ranks(layout, world, layout.place(world.rank, layout.lanes), 0, messages, wire(workload))
    if handoff is None or route is None or world.rank not in route:
        return lambda: None
    if world.rank == route[1]:
        return handoff.take
    twin = Twin(*workload.pixels())
    return lambda: handoff.put(twin)


def _lap(run: Callable[[], object], world: World) -> Candidate:
    """The mean over several runs, each of which all ranks start together."""

    def lap() -> Lap:
        laps = []
        for _ in range(_REPEATS):
            world.barrier()
            laps.append(time_run(run))
        return Lap(*(sum(part) / _REPEATS for part in zip(*laps, strict=True)))

    return lap
