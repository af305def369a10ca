"""The time of layouts: methods with their roles on separate ranks against vanilla, each rank on its own core or GPU.

A lane has one or more ranks per role. If the machine is too small for a lane with several, its step is composed: each
role runs alone, without communication, and the slowest one determines the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from conadv.core.catalog import METHODS
from conadv.core.handoff import Twin
from conadv.core.share import TwinShare
from conadv.parallel.collectives import World, own_device
from conadv.parallel.gradients import Exchange
from conadv.parallel.layout import Layout
from conadv.parallel.wire import Wire

from .alternate import Tell, alternate
from .contender import Contender, block_steps, build_share, build_step, repeated, take_turns, wire
from .ranks import one_core, places, run_ranks
from .result import Findings, Goal, Result, Spread, work_time
from .workload import Workload

ROUNDS = 5
OVERLAPPED = {name: method.overlapped for name, method in METHODS.items() if name != "vanilla"}
_GOALS = {
    "recycled/vanilla-2": Goal("≤", 1.03),
    "recycled/vanilla-1": Goal("≤", 1.06),
    "disadv/vanilla-2": Goal("≥", 1.5),
}
_NOTES = (
    "vanilla-N: data-parallel on N ranks; the others: one lane, each rank with the same chunk as one of vanilla's",
    "beside/vanilla-1: what the cores cost each other, without any exchange",
)
# Steps of a role per lap: with twins of a quarter of the chunks, a rank may generate some in every fourth step only.
_STEPS = 4
Seconds = Mapping[str, Sequence[float]]
"""Seconds of a step of each contender, one value per round."""


def _lane(name: str, method: str, layout: str, share: str = "1") -> Contender:
    """One lane with the fewest chunks that can be divided among its ranks."""
    chunks = Layout.lane_of(layout, METHODS[method].duties).smallest(TwinShare.from_number(share).of)
    return Contender(name, method, layout, chunks=chunks, share=share)


LANES = (
    _lane("recycled-2+1", "recycled", "2 clean | adv", "1/2"),
    _lane("recycled-4+1", "recycled", "4 clean | adv", "1/4"),
    _lane("conadv-2+2+1", "conadv", "2 clean | 2 adv | attack"),
    _lane("conadv-3+3+2", "conadv", "3 clean | 3 adv | 2 attack"),
)


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """The step time of each lane divided by vanilla's. Ranks show their own progress."""
    sizes = sorted({*map(_width, OVERLAPPED), *(one.lane.world_size for one in LANES)})
    found = {
        size: run_ranks(["conadv.study.bench.layout:together"], size, workload, rounds)[0]
        for size in sizes
        if size <= places()
    }
    ratios = [one for size, by in found.items() for one in measured_ratios(size, by["wall"], by["work"])]
    composed = [one for one in LANES if one.lane.world_size not in found]
    with one_core():
        seconds = compose(composed, workload, rounds, tell)
    for lane in LANES:
        laps = seconds if lane in composed else found[lane.lane.world_size]["wall"]
        spread = Spread.of_ratio(laps[lane.name], laps[f"{lane.name} vanilla"])
        ratios.append(Result(f"{lane.name}/vanilla", spread, composed=lane in composed))
    missing = [
        f"without {', '.join(of_width(size))}: {size} ranks need as many cores or GPUs, and there are {places()}; "
        "python benchmarks/composed.py composes a step from its parts"
        for size in sizes
        if size not in found and of_width(size)
    ]
    lanes = [f'{one.name}: {one.method} "{one.layout}", twins of {one.share} of the chunks' for one in LANES]
    how = f"composed on {places()} cores: each role alone, without any exchange"
    return Findings(ratios, [*_NOTES, *missing, *lanes, how])


# On ranks of their own


def together(workload: Workload, rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Time every contender on these ranks; see `take_turns`."""
    lanes = [one for one in LANES if one.lane.world_size == world.size]
    everyone = [*contenders(world.size), *lanes, *map(vanilla_of, lanes)]
    shares = {one.name: build_share(one, workload, world, block_steps(rounds)) for one in everyone}
    return take_turns(shares, rounds, world)


def contenders(size: int) -> list[Contender]:
    """The methods whose lane, with one rank per role, has `size` ranks, and vanilla; empty if there are none."""
    methods = [Contender(method, method, OVERLAPPED[method]) for method in of_width(size)]
    vanilla = [
        Contender("vanilla-1", "vanilla", ranks="alone"),
        Contender("beside", "vanilla", ranks="beside"),
        Contender(f"vanilla-{size}", "vanilla"),
    ]
    return [*vanilla[: 3 if size > 1 else 1], *methods] if methods else []


def of_width(size: int) -> list[str]:
    """The methods whose lane has `size` ranks."""
    return [method for method in OVERLAPPED if _width(method) == size]


def _width(method: str) -> int:
    return OVERLAPPED[method].count("|") + 1


def measured_ratios(size: int, wall: Seconds, work: Seconds) -> list[Result]:
    """Ratios of contenders that ran on the same ranks."""
    return [
        ratio(wall, first, second, composed=False, work=Spread.of_ratio(work[first], work[second]).median)
        for first, second in (*pairs(size), *([("beside", "vanilla-1")] if size > 1 and of_width(size) else []))
    ]


def pairs(size: int) -> list[tuple[str, str]]:
    """The comparisons on `size` ranks: each method with vanilla on `size` ranks and on one, and vanilla with itself."""
    bases = dict.fromkeys((f"vanilla-{size}", "vanilla-1"))
    found = [(method, base) for method in of_width(size) for base in bases]
    return [*found, (f"vanilla-{size}", "vanilla-1")] if found and size > 1 else found


def ratio(seconds: Seconds, first: str, second: str, composed: bool, work: float | None = None) -> Result:
    """The ratio of two contenders, with its goal if it has one."""
    name, spread = f"{first}/{second}", Spread.of_ratio(seconds[first], seconds[second])
    return Result(name, spread, _GOALS.get(name), composed=composed, work=work)


# Composed, in this process


def vanilla_of(lane: Contender) -> Contender:
    """Vanilla on one rank, with as many chunks as a clean rank of the lane."""
    place = lane.lane.place(lane.lane.ranks(0, METHODS["vanilla"].duties)[0], lane.chunks)
    return Contender(f"{lane.name} vanilla", "vanilla", ranks="alone", chunks=place.chunks or 1)


def compose(lanes: Sequence[Contender], workload: Workload, rounds: int, tell: Tell) -> dict[str, list[float]]:
    """Seconds per step of lanes and their vanilla, by round, composed from one rank of each role running alone."""
    everyone = [*lanes, *map(vanilla_of, lanes)]
    ranks = {one.name: [one.lane.roles.index(role) for role in one.lane.counts] for one in everyone}
    runs = {f"{one.name} {rank}": role_alone(one, rank, workload) for one in everyone for rank in ranks[one.name]}
    laps = {name: list(map(work_time, found)) for name, found in alternate(runs, rounds, tell=tell).items()}
    return {
        name: [max(seconds) for seconds in zip(*(laps[f"{name} {rank}"] for rank in own), strict=True)]
        for name, own in ranks.items()
    }


def role_alone(lane: Contender, rank: int, workload: Workload, steps: int = _STEPS) -> Callable[[], None]:
    """A few steps of one rank of a lane, without communication."""
    place = lane.lane.place(rank, lane.chunks)
    model = workload.build(lane.method)
    handoff = Echo(wire(workload), workload) if lane.lane.hands_over else None
    exchange = Exchange(model, World(0, 1, own_device()), place.share)
    return repeated(build_step(workload, lane.method, model, place, exchange, handoff, lane.share), steps)


class Echo:
    """A hand-off without a peer: `put` packs a twin and discards it, `take` unpacks always the same message."""

    def __init__(self, wire: Wire, workload: Workload) -> None:
        self._wire = wire
        self._message = wire.pack(Twin(*workload.pixels()))

    def put(self, twin: Twin) -> None:
        self._wire.pack(twin)

    def take(self) -> Twin:
        return self._wire.unpack(self._message)

    def clear(self) -> None:
        """Nothing is ever in flight."""
