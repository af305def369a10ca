"""What a layout costs: methods with roles on ranks of their own against vanilla, each rank on a core of its own.

measured   cores for all ranks: the contenders alternate on the same ranks
composed   fewer cores: each rank's work is measured alone, the exchange with all ranks, and a step put together:
           the longest of (work, and the hand-off for whoever makes twins), then the exchange, none of it overlapped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from conadv.parallel.layout import Layout

from .alternate import Tell
from .machine import cores, one_core
from .pieces import roles_alone
from .ranks import run_ranks
from .result import Findings, Goal, Ratio, Spread
from .together import LAYOUTS, lane_width
from .workload import Workload, duties_of

ROUNDS = 5
_GOALS = {
    "recycled/vanilla-2": Goal("≤", 1.03),
    "recycled/vanilla-1": Goal("≤", 1.06),
    "disadv/vanilla-2": Goal("≥", 1.5),
}
_NOTES = (
    "vanilla-N: data-parallel on N ranks; the others: one lane, each rank with the same chunk as one of vanilla's",
    "beside/vanilla-1: what two cores cost each other, without any exchange",
    "-after: one sum after the backward pass; -ddp: DistributedDataParallel, which sums gradients alone",
    "composed: from each rank's work alone, the hand-off and the exchange, none of it overlapped",
)
Seconds = Mapping[str, Sequence[float]]
"""A step of each contender, a figure a round."""


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Times of a step on ranks of their own; the ranks tell their progress themselves."""
    with one_core():
        roles = roles_alone(workload, rounds, tell)
    ratios: list[Ratio] = []
    profile: list[Mapping[str, Any]] = []
    for size in sorted({lane_width(layout) for layout in LAYOUTS.values()}):
        enough = size <= len(cores())
        found = run_ranks(["together", "exchange"] if enough else ["exchange"], size, workload, rounds)
        if enough:
            together = found["together"]
            ratios += measured_ratios(size, together["wall"], together["work"])
            profile += together["profile"]
        ratios += composed_ratios(size, compose(size, roles, found["exchange"]), measured=enough)
    return Findings(ratios, _NOTES, profile)


def measured_ratios(size: int, wall: Seconds, work: Seconds) -> list[Ratio]:
    vanilla = f"vanilla-{size}"
    pairs = [(method, base) for method in _methods(size) for base in (vanilla, "vanilla-1")]
    pairs += [(vanilla, "vanilla-1"), ("beside", "vanilla-1")]
    pairs += [(f"{vanilla}-after", vanilla), (f"{vanilla}-ddp", vanilla)]
    return [
        replace(_ratio(wall, first, second, composed=False), work=_spread(work, first, second).median)
        for first, second in pairs
    ]


def composed_ratios(size: int, seconds: Seconds, measured: bool) -> list[Ratio]:
    """measured: the same was, so that these only show how far the composition is to be trusted."""
    vanilla = f"vanilla-{size}"
    pairs = [(method, base) for method in _methods(size) for base in (vanilla, "vanilla-1")] + [(vanilla, "vanilla-1")]
    ratios = [_ratio(seconds, first, second, composed=True) for first, second in pairs]
    return [replace(ratio, name=f"{ratio.name} composed", goal=None) for ratio in ratios] if measured else ratios


def compose(
    size: int, roles: Mapping[str, Sequence[Sequence[float]]], between: Mapping[str, Seconds]
) -> dict[str, list[float]]:
    """Seconds a step on `size` ranks, round by round, from the work of each rank and the medians of what is between."""
    alone = list(roles["vanilla"][0])
    exchange = {method: median(found["exchange"]) for method, found in between.items()}
    steps = {"vanilla-1": alone, f"vanilla-{size}": [seconds + exchange["vanilla"] for seconds in alone]}
    for method in _methods(size):
        layout = Layout.fit(LAYOUTS[method], duties_of(method), size)
        route = layout.route(0)
        handoff = median(between[method]["hand-off"])
        ranks = [
            [seconds + (handoff if route and rank == route[0] else 0.0) for seconds in roles[method][rank]]
            for rank in range(size)
        ]
        steps[method] = [max(together) + exchange[method] for together in zip(*ranks, strict=True)]
    return steps


def _methods(size: int) -> list[str]:
    """Those of which one lane fills so many ranks."""
    return [method for method, layout in LAYOUTS.items() if lane_width(layout) == size]


def _ratio(seconds: Seconds, first: str, second: str, composed: bool) -> Ratio:
    name = f"{first}/{second}"
    return Ratio(name, _spread(seconds, first, second), _GOALS.get(name), composed=composed)


def _spread(seconds: Seconds, first: str, second: str) -> Spread:
    rounds = zip(seconds[first], seconds[second], strict=True)
    return Spread.of([above / below for above, below in rounds])
