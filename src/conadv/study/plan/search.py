"""Search over numbers of ranks and shares of twins: the best layout of each method, and step time by devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from conadv.core.catalog import METHODS
from conadv.core.roles import Role

from .lane import fit_lane
from .planner import fitting_lanes, preference
from .request import PlanRequest
from .row import PlanRow, evaluate


@dataclass(frozen=True)
class Search:
    """The best row of each method and share, and its Pareto frontier of step time and devices."""

    request: PlanRequest
    best: tuple[PlanRow, ...]
    frontier: tuple[PlanRow, ...]
    """Rows that no other row of the same method and share beats in both step time and devices."""

    def to_json(self) -> dict[str, Any]:
        """One object with the inputs and lists of rows."""
        rows = {name: [asdict(row) for row in getattr(self, name)] for name in ("best", "frontier")}
        return {"inputs": self.request.to_json(), **rows}


def search(request: PlanRequest) -> Search:
    """Try every lane of at most `lane_ranks` ranks, every share, and every number of lanes that fits the machine."""
    best: list[PlanRow] = []
    frontier: list[PlanRow] = []
    for method in request.methods:
        for share in _shares(request, method):
            rows = list(_rows(request, method, share))
            chosen = _choose(rows, request.deadline)
            best += [] if chosen is None else [chosen]
            frontier += pareto(rows)
    if not best:
        wanted = "" if request.deadline is None else f" in {request.deadline:g} hours"
        raise ValueError(
            f"no layout trains this batch on {request.machine.devices} devices{wanted}: add devices or time"
        )
    return Search(request, tuple(best), tuple(frontier))


def lanes_of(method: str, most: int) -> Iterator[str]:
    """Every lane of a method with at most `most` ranks; of those with equal proportions, the smallest."""
    for layout in METHODS[method].layouts:
        roles = layout.split(" | ")
        for counts in product(range(1, most + 1), repeat=len(roles)):
            if sum(counts) <= most and math.gcd(*counts) == 1:
                yield " | ".join(
                    f"{count} {role}" if count > 1 else role for count, role in zip(counts, roles, strict=True)
                )


def pareto(rows: Iterable[PlanRow]) -> list[PlanRow]:
    """The rows that are not dominated in ranks and step time."""
    found: list[PlanRow] = []
    for row in sorted(rows, key=lambda row: (row.ranks, *preference(row))):
        if not found or preference(row)[0] < preference(found[-1])[0]:
            found.append(row)
    return found


def _shares(request: PlanRequest, method: str) -> list[Fraction]:
    if METHODS[method].maker is None:
        return [Fraction(1)]
    return [Fraction(share).limit_denominator(1000) for share in request.shares]


def _rows(request: PlanRequest, method: str, share: Fraction) -> Iterator[PlanRow]:
    if METHODS[method].maker not in (None, Role.ATTACK) and request.attack_steps > 1:
        return  # its attack has one step
    for text in lanes_of(method, min(request.lane_ranks, request.machine.devices)):
        lane = fit_lane(text, METHODS[method].duties)
        assert lane is not None
        for lanes in fitting_lanes(request, lane, request.batch_size, share):
            yield evaluate(request, method, text, lanes, twin_share=share)


def _choose(rows: list[PlanRow], deadline: float | None) -> PlanRow | None:
    """The shortest step; with a deadline, the fewest devices that meet it."""
    if deadline is None:
        return min(rows, key=preference, default=None)
    in_time = [row for row in rows if row.hours <= deadline]
    return min(in_time, key=lambda row: (row.ranks, *preference(row)), default=None)
