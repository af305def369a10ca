"""Lanes in which several ranks share a role, against vanilla with as many chunks per rank.

Where each rank can have a core or GPU of its own, a lane is measured. Otherwise its step is composed: the longest of
the times that the ranks of each role take alone, without any exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conadv.core.catalog import METHODS
from conadv.core.handoff import Twin
from conadv.core.share import TwinShare
from conadv.parallel.collectives import World, own_device
from conadv.parallel.gradients import Exchange
from conadv.parallel.layout import Layout
from conadv.parallel.wire import Wire

from .alternate import Tell, alternate
from .contender import Contender, block_steps, build_share, build_step, take_turns, wire
from .ranks import one_core, places, run_ranks
from .result import Findings, Ratio, Spread, work_time
from .workload import Workload

_STEPS = 4
"""Steps per lap: with twins of a quarter of the chunks, a rank may generate some in every fourth step only."""


@dataclass(frozen=True)
class UnevenLane:
    """A lane by name."""

    name: str
    method: str
    layout: str
    share: str = "1"

    @property
    def lane(self) -> Layout:
        return Layout.lane_of(self.layout, METHODS[self.method].duties)

    @property
    def chunks(self) -> int:
        """The fewest that its ranks can share."""
        return self.lane.smallest(TwinShare.from_number(self.share).of)

    @property
    def clean_chunks(self) -> int:
        """Those of one rank that learns from images."""
        place = self.lane.place(self.lane.ranks(0, METHODS["vanilla"].duties)[0], self.chunks)
        assert place.chunks is not None
        return place.chunks

    @property
    def contenders(self) -> list[Contender]:
        """The lane, and vanilla on one rank with the chunks of one rank that learns from images."""
        vanilla = Contender(f"{self.name} vanilla", "vanilla", ranks="alone", chunks=self.clean_chunks)
        return [Contender(self.name, self.method, self.layout, chunks=self.chunks, share=self.share), vanilla]


LANES = (
    UnevenLane("recycled-2+1", "recycled", "2 clean | adv", "1/2"),
    UnevenLane("recycled-4+1", "recycled", "4 clean | adv", "1/4"),
    UnevenLane("conadv-2+2+1", "conadv", "2 clean | 2 adv | attack"),
    UnevenLane("conadv-3+3+2", "conadv", "3 clean | 3 adv | 2 attack"),
)


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """The step of each lane, divided by vanilla's; those for which the machine is too small are composed."""
    ratios: list[Ratio] = []
    fitting = [lane for lane in LANES if lane.lane.world_size <= places()]
    for size in sorted({lane.lane.world_size for lane in fitting}):
        (found,) = run_ranks(["conadv.study.bench.uneven:together"], size, workload, rounds)
        ratios += [_ratio(lane, found["wall"], composed=False) for lane in fitting if lane.lane.world_size == size]
    composed = [lane for lane in LANES if lane not in fitting]
    with one_core():
        seconds = compose(composed, workload, rounds, tell)
    ratios += [_ratio(lane, seconds, composed=True) for lane in composed]
    notes = [f'{lane.name}: {lane.method} "{lane.layout}", twins of {lane.share} of the chunks' for lane in LANES]
    return Findings(ratios, [*notes, f"composed on {places()} cores: each role alone, without any exchange"])


def together(workload: Workload, rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Seconds per step of the lanes that fill these ranks, each in turn with its vanilla."""
    contenders = [one for lane in LANES if lane.lane.world_size == world.size for one in lane.contenders]
    shares = {one.name: build_share(one, workload, world, block_steps(rounds)) for one in contenders}
    seconds = take_turns(shares, rounds, world)
    for share in shares.values():
        if share is not None and share.handoff is not None:
            share.handoff.drain()
    return seconds


def compose(lanes: list[UnevenLane], workload: Workload, rounds: int, tell: Tell) -> dict[str, list[float]]:
    """Seconds per step by lane and round, from the time of one rank of each role alone. In this process."""
    roles = {lane.name: [lane.lane.roles.index(role) for role in lane.lane.counts] for lane in lanes}
    runs = {f"{lane.name} {rank}": role_alone(lane, rank, workload) for lane in lanes for rank in roles[lane.name]}
    vanilla = {count: UnevenLane("", "vanilla", "clean") for count in {lane.clean_chunks for lane in lanes}}
    runs |= {f"vanilla {count}": role_alone(lane, 0, workload, count) for count, lane in vanilla.items()}
    laps = {name: list(map(work_time, found)) for name, found in alternate(runs, rounds, tell=tell).items()}
    found = {f"{lane.name} vanilla": laps[f"vanilla {lane.clean_chunks}"] for lane in lanes}
    for lane in lanes:
        ranks = [laps[f"{lane.name} {rank}"] for rank in roles[lane.name]]
        found[lane.name] = [max(seconds) for seconds in zip(*ranks, strict=True)]
    return found


def role_alone(lane: UnevenLane, rank: int, workload: Workload, chunks: int | None = None) -> Callable[[], None]:
    """What one rank of a lane does in a few steps, in a process of its own that exchanges nothing."""
    place = lane.lane.place(rank, chunks or lane.chunks)
    model = workload.build(lane.method)
    handoff = Echo(wire(workload), workload) if lane.lane.hands_over else None
    exchange = Exchange(model, World(0, 1, own_device()), place.share)
    step = build_step(workload, lane.method, model, place, exchange, handoff, lane.share)

    def run() -> None:
        for _ in range(_STEPS):
            step()

    return run


class Echo:
    """A hand-off without another side: it packs what it is given, and unpacks a message that it always has."""

    def __init__(self, wire: Wire, workload: Workload) -> None:
        self._wire = wire
        self._message = wire.pack(Twin(*workload.pixels()))

    def put(self, twin: Twin) -> None:
        self._wire.pack(twin)

    def take(self) -> Twin:
        return self._wire.unpack(self._message)

    def clear(self) -> None:
        """Nothing is ever in flight."""


def _ratio(lane: UnevenLane, seconds: dict[str, list[float]], composed: bool) -> Ratio:
    pairs = zip(seconds[lane.name], seconds[f"{lane.name} vanilla"], strict=True)
    spread = Spread.of([above / below for above, below in pairs])
    return Ratio(f"{lane.name}/vanilla", spread, None, composed=composed)
