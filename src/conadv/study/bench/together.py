"""Contenders in turn on the same ranks: each is built once, then they alternate, a block of steps each.

Between two blocks the ranks meet at a barrier, and a rank without a part in a block sleeps there. The first step of a
block is not timed: with it, twins come under way as they are in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from conadv.parallel.collectives import World
from conadv.parallel.layout import Layout

from .alternate import Candidate, Lap, Laps, in_turn, time_run
from .contender import Contender, Share, build_share
from .profile import PARTS, profile
from .progress import progress
from .result import wall_time, work_time
from .workload import Workload, duties_of

LAYOUTS = {"disadv": "clean | adv+attack", "conadv": "clean | adv | attack", "recycled": "clean | adv"}
STEPS = 3
"""Timed steps a block."""
_WARMUP = 1


def lane_width(layout: str) -> int:
    return layout.count("|") + 1


def contenders(size: int) -> list[Contender]:
    """What is measured on so many ranks: vanilla, and the methods of which a lane has this width."""
    vanilla = f"vanilla-{size}"
    found = [
        Contender("vanilla-1", "vanilla", ranks="alone"),
        Contender("beside", "vanilla", ranks="beside"),
        Contender(vanilla, "vanilla"),
        Contender(f"{vanilla}-after", "vanilla", reduction="after"),
        Contender(f"{vanilla}-ddp", "vanilla", reduction="ddp"),
    ]
    lanes = {method: layout for method, layout in LAYOUTS.items() if lane_width(layout) == size}
    return found + [Contender(method, method, layout) for method, layout in lanes.items()]


def together(workload: Workload, rounds: int, world: World) -> dict[str, Any]:
    """Seconds a step of each contender, a figure a round, on the wall and of work, and where they went."""
    steps = (_WARMUP + rounds + 1) * (1 + STEPS)  # the last block is profiled
    shares = {c.name: build_share(c, workload, world, steps) for c in contenders(world.size)}
    blocks = {name: _block(share, world) for name, share in shares.items()}
    tell = progress(f"layout on {world.size} ranks") if world.is_main else lambda done, total: None
    laps = in_turn(blocks, rounds, warmup=_WARMUP, tell=tell)
    rows = {name: _profile_block(share, world) for name, share in shares.items()}
    for share in shares.values():
        if share is not None and share.handoff is not None:
            share.handoff.drain()
    wall, work = (slowest(laps, world, clock) for clock in (wall_time, work_time))
    return {"wall": _a_step(wall), "work": _a_step(work), "profile": _profiles(rows, world)}


def _block(share: Share | None, world: World) -> Candidate:
    def run() -> Lap:
        world.barrier()
        if share is None:
            return Lap(0.0, 0.0)
        share.step()
        return time_run(partial(_take_steps, share))

    return run


def _take_steps(share: Share) -> None:
    for _ in range(STEPS):
        share.step()


def _profile_block(share: Share | None, world: World) -> list[float]:
    world.barrier()
    if share is None:
        return [0.0] * len(PARTS)
    share.step()
    seconds = profile(partial(_take_steps, share))
    return [seconds[part] / STEPS for part in PARTS]


def slowest(laps: Laps, world: World, clock: Callable[[Lap], float]) -> dict[str, torch.Tensor]:
    """Seconds by round, in each those of the rank that took longest."""
    own = torch.tensor([list(map(clock, rounds)) for rounds in laps.values()], dtype=torch.float64)
    return dict(zip(laps, _gathered(own, world).amax(dim=0), strict=True))


def _a_step(blocks: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: (seconds / STEPS).tolist() for name, seconds in blocks.items()}


def _profiles(rows: Mapping[str, list[float]], world: World) -> list[dict[str, Any]]:
    """A row for each contender and each rank that has a part in it."""
    seconds = _gathered(torch.tensor([*rows.values()], dtype=torch.float64), world)
    found = []
    for number, contender in enumerate(contenders(world.size)):
        for rank in range(world.size):
            parts = seconds[rank, number].tolist()
            if any(parts):
                place = _place(contender, rank, world)
                found.append({"name": contender.name, "place": place, "seconds": dict(zip(PARTS, parts, strict=True))})
    return found


def _place(contender: Contender, rank: int, world: World) -> str:
    if contender.ranks != "together":
        return f"rank {rank}"
    return Layout.fit(contender.layout, duties_of(contender.method), world.size).describe(rank)


def _gathered(own: torch.Tensor, world: World) -> torch.Tensor:
    """What each rank has, by rank: a sum in which every other rank has zeros."""
    everyone = own.new_zeros((world.size, *own.shape))
    everyone[world.rank] = own
    return world.all_reduce(everyone)
