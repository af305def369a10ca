"""Layouts with more ranks than this machine has cores: a step composed from parts that are measured one by one.

    python benchmarks/composed.py --json

Each rank's work is measured alone, the communication with all ranks. A step is the longest of (work, plus the hand-off
for the rank that makes twins), then the exchange, none of it overlapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from conadv.core.catalog import METHODS
from conadv.core.handoff import Twin
from conadv.core.parts import Losses
from conadv.core.roles import Role
from conadv.parallel.collectives import World
from conadv.parallel.gradients import Exchange
from conadv.parallel.handoff import between_ranks
from conadv.parallel.layout import Layout
from conadv.parallel.traffic import Traffic
from conadv.study.bench.alternate import Candidate, Lap, Tell, alternate, in_turn, progress, silent, time_run
from conadv.study.bench.command import Measurement
from conadv.study.bench.contender import Contender, slowest, wire
from conadv.study.bench.layout import OVERLAPPED, Seconds, of_width, pairs, ratio, role_alone
from conadv.study.bench.ranks import one_core, run_ranks
from conadv.study.bench.result import Findings, wall_time, work_time
from conadv.study.bench.workload import Workload
from scripts import run_workload

_WARMUP = 2
# Exchanges and hand-offs are short: so many make a lap.
_REPEATS = 10


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Composed ratios of every method to vanilla."""
    with one_core():
        roles = roles_alone(workload, rounds, tell)
    ratios = []
    for size in sorted({layout.count("|") + 1 for layout in OVERLAPPED.values()}):
        (between,) = run_ranks(["composed:exchange"], size, workload, rounds)
        seconds = compose(size, roles, between)
        ratios += [ratio(seconds, first, second, composed=True) for first, second in pairs(size)]
    notes = ["composed: from each rank's work alone, the hand-off and the exchange, none of it overlapped"]
    return Findings([replace(found, goal=None) for found in ratios], notes)


def compose(
    size: int, roles: Mapping[str, Sequence[Sequence[float]]], between: Mapping[str, Seconds]
) -> dict[str, list[float]]:
    """Seconds per step on `size` ranks, round by round, from the work of each rank and the median communication."""
    alone = list(roles["vanilla"][0])
    exchange = {method: median(found["exchange"]) for method, found in between.items()}
    steps = {"vanilla-1": alone, f"vanilla-{size}": [seconds + exchange["vanilla"] for seconds in alone]}
    for method in of_width(size):
        makers = lane(method).ranks(0, lane(method).maker()) if lane(method).hands_over else range(0)
        handoff = median(between[method]["hand-off"])
        ranks = [
            [seconds + (handoff if rank in makers else 0.0) for seconds in roles[method][rank]] for rank in range(size)
        ]
        steps[method] = [max(together) + exchange[method] for together in zip(*ranks, strict=True)]
    return steps


def lane(method: str) -> Layout:
    """One lane of the layout in which a method is measured."""
    info = METHODS[method]
    return Layout.lane_of(info.overlapped, info.duties)


def roles_alone(workload: Workload, rounds: int, tell: Tell) -> dict[str, list[list[float]]]:
    """Seconds per step of each rank of a lane, by method: rank by rank, one value per round. In this process."""
    ranks = {method: range(lane(method).world_size) for method in METHODS}
    runs = {
        f"{method} {rank}": role_alone(Contender(method, method, METHODS[method].overlapped), rank, workload, steps=1)
        for method in METHODS
        for rank in ranks[method]
    }
    laps = alternate(runs, rounds, warmup=_WARMUP, tell=tell)
    return {method: [list(map(work_time, laps[f"{method} {rank}"])) for rank in ranks[method]] for method in METHODS}


def exchange(workload: Workload, rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Seconds of the all_reduce of a step and of the hand-off of a twin, for methods that fill these ranks."""
    methods = ["vanilla", *of_width(world.size)]
    candidates: dict[str, Candidate] = {}
    for method in methods:
        messages = (_WARMUP + rounds) * _REPEATS
        candidates[f"{method} sums"] = _lap(_exchange(workload, method, world), world)
        candidates[f"{method} no sums"] = _lap(_exchange(workload, method, World(0, 1, world.device)), world)
        candidates[f"{method} hand-off"] = _lap(_handover(workload, method, world, messages), world)
    tell = progress(f"exchange of {world.size} ranks") if world.is_main else silent
    seconds = slowest(in_turn(candidates, rounds, warmup=_WARMUP, tell=tell), world, wall_time)
    return {
        method: {
            # What every rank does for itself is part of its own work.
            "exchange": (seconds[f"{method} sums"] - seconds[f"{method} no sums"]).clamp(min=0).tolist(),
            "hand-off": seconds[f"{method} hand-off"].tolist(),
        }
        for method in methods
    }


def _exchange(workload: Workload, method: str, world: World) -> Callable[[], object]:
    """The exchange of a step that brought no gradient."""
    exchange = Exchange(workload.build(method), world, 1.0)
    losses = Losses(torch.zeros((), device=world.device), torch.zeros((), device=world.device))

    def run() -> None:
        exchange.zero_grad()
        exchange.finish(losses)

    return run


def _handover(workload: Workload, method: str, world: World, messages: int) -> Callable[[], object]:
    """What this rank does to bring one twin from the rank that makes it to the rank that takes it."""
    layout = Layout.fit(METHODS[method].overlapped, METHODS[method].duties, world.size)
    handoff = between_ranks(Traffic(layout, world.rank, layout.lanes, 0), world, wire(workload))
    if handoff is None:
        return lambda: None
    handoff.announce(0, messages)
    if Role.ADV in layout.role(world.rank):
        return handoff.take
    twin = Twin(*workload.pixels())
    return (lambda: handoff.put(twin)) if layout.maker() in layout.role(world.rank) else lambda: None


def _lap(run: Callable[[], object], world: World) -> Candidate:
    """The mean over several runs, each of which all ranks start together."""

    def lap() -> Lap:
        laps = []
        for _ in range(_REPEATS):
            world.barrier()
            laps.append(time_run(run))
        return Lap(*(sum(part) / _REPEATS for part in zip(*laps, strict=True)))

    return lap


if __name__ == "__main__":
    run_workload("composed", Measurement(measure, Workload(), 5, one_core=False), __doc__)
