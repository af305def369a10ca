"""What a layout costs: methods with roles on ranks of their own against vanilla, each rank on its own core or GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import uneven
from .alternate import Tell
from .contender import OVERLAPPED, of_width
from .ranks import places, run_ranks
from .result import Findings, Goal, Ratio, Spread
from .workload import Workload

ROUNDS = 5
_GOALS = {
    "recycled/vanilla-2": Goal("≤", 1.03),
    "recycled/vanilla-1": Goal("≤", 1.06),
    "disadv/vanilla-2": Goal("≥", 1.5),
}
_NOTES = (
    "vanilla-N: data-parallel on N ranks; the others: one lane, each rank with the same chunk as one of vanilla's",
    "beside/vanilla-1: what the cores cost each other, without any exchange",
)
Seconds = Mapping[str, Sequence[float]]
"""A step of each contender, one value per round."""


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Times of a step on ranks of their own; the ranks show their progress themselves."""
    ratios: list[Ratio] = []
    notes = list(_NOTES)
    for size in sorted({layout.count("|") + 1 for layout in OVERLAPPED.values()}):
        if size <= places():
            (found,) = run_ranks(["conadv.study.bench.contender:together"], size, workload, rounds)
            ratios += measured_ratios(size, found["wall"], found["work"])
        else:
            notes.append(
                f"without {', '.join(of_width(size))}: {size} ranks need as many cores or GPUs, and there are "
                f"{places()}; python benchmarks/composed.py composes a step from its parts"
            )
    shared = uneven.measure(workload, rounds, tell)
    return Findings([*ratios, *shared.results], [*notes, *shared.notes])


def measured_ratios(size: int, wall: Seconds, work: Seconds) -> list[Ratio]:
    """Ratios of contenders that ran on the same ranks."""
    return [
        ratio(wall, first, second, composed=False, work=spread(work, first, second).median)
        for first, second in (*pairs(size), *([("beside", "vanilla-1")] if size > 1 else []))
    ]


def pairs(size: int) -> list[tuple[str, str]]:
    """What is compared on `size` ranks: each method with vanilla on as many and on one, and vanilla with itself."""
    bases = dict.fromkeys((f"vanilla-{size}", "vanilla-1"))
    found = [(method, base) for method in of_width(size) for base in bases]
    return [*found, (f"vanilla-{size}", "vanilla-1")] if size > 1 else found


def ratio(seconds: Seconds, first: str, second: str, composed: bool, work: float | None = None) -> Ratio:
    """The ratio of two contenders, with its goal if it has one."""
    name = f"{first}/{second}"
    return Ratio(name, spread(seconds, first, second), _GOALS.get(name), composed=composed, work=work)


def spread(seconds: Seconds, first: str, second: str) -> Spread:
    """The ratios of two contenders, round by round."""
    return Spread.of([above / below for above, below in zip(seconds[first], seconds[second], strict=True)])
