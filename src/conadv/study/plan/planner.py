"""Make a plan: each method in each layout with its best number of lanes, for several batch sizes and machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from conadv.core.catalog import METHODS
from conadv.core.roles import Role
from conadv.parallel.layout import Layout

from .lane import fit_lane
from .request import MOST_NODES, PlanRequest
from .row import PlanRow, evaluate

# A larger batch stops paying once the fastest one of the sweep is faster by no more than this.
PAYS = 0.05


@dataclass(frozen=True)
class LeftOut:
    """A layout that was not planned, and why."""

    method: str
    layout: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The answer: one row per method and layout, and the best rows of each method for other batches and machines."""

    request: PlanRequest
    rows: tuple[PlanRow, ...]
    left_out: tuple[LeftOut, ...]
    by_batch: tuple[PlanRow, ...]
    by_nodes: tuple[PlanRow, ...]
    """Machines of 1, 2, 4, … nodes, up to the largest that the batch can keep busy."""
    stops_paying: dict[str, int | None]
    """The batch size from which a larger one does not pay, by method; None: the largest of the sweep still pays."""

    def to_json(self) -> dict[str, Any]:
        """One object with the inputs and lists of rows."""
        lists = ("rows", "left_out", "by_batch", "by_nodes")
        rows = {name: [asdict(entry) for entry in getattr(self, name)] for name in lists}
        return {"inputs": self.request.to_json(), **rows, "stops_paying": dict(self.stops_paying)}


def plan(request: PlanRequest) -> Plan:
    """Estimate each method on the machine; a layout that does not fit is left out, with the reason."""
    combinations = list(_combinations(request))
    reasons = [(method, str(lane), _obstacle(request, method, lane)) for method, lane in combinations]
    left_out = tuple(LeftOut(method, lane, reason) for method, lane, reason in reasons if reason is not None)
    if len(left_out) == len(combinations):
        raise ValueError(f"no layout fits: {left_out[0].layout} {left_out[0].reason}; add devices or a layout")
    rows = _rows(request, request.batch_size)
    by_batch = tuple(row for size in request.batches() for row in _rows(request, size) if row.best)
    by_nodes = tuple(row for machine in _machines(request) for row in _rows(machine, request.batch_size) if row.best)
    stops = {method: _stops_paying([row for row in by_batch if row.method == method]) for method in request.methods}
    return Plan(request, rows, left_out, by_batch, by_nodes, stops)


def _machines(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request for machines of other sizes."""
    widest = max(lane.world_size for _, lane in _combinations(request))
    useful = request.machine.nodes_for(widest * request.batch_size // request.chunk_size)
    most = max(request.nodes, useful)
    doublings = {1 << power for power in range((most - 1).bit_length() + 1)}
    for nodes in sorted({nodes for nodes in doublings if nodes <= MOST_NODES} | {request.nodes}):
        yield replace(request, nodes=nodes)


def _combinations(request: PlanRequest) -> Iterator[tuple[str, Layout]]:
    """Every method with one lane of each layout that suits it."""
    for method in request.methods:
        for layout in request.layouts:
            lane = fit_lane(layout, METHODS[method].duties)
            if lane is not None:
                yield method, lane


def _obstacle(request: PlanRequest, method: str, lane: Layout) -> str | None:
    width, devices = lane.world_size, request.machine.devices
    if width > devices:
        return f"needs {width} devices, and the machine has {devices}"
    fewest = _fewest(lane, request.share)
    if request.batch_size // request.chunk_size % fewest:
        return f"shares a multiple of {fewest} chunks among its ranks, which the batch does not have"
    if METHODS[method].maker not in (None, Role.ATTACK) and request.attack_steps > 1:
        return f"takes one step of attack, and {request.attack_steps} were asked for"
    return None


def _fewest(lane: Layout, share: Fraction) -> int:
    """The fewest chunks that can be divided among the ranks of a lane."""
    return lane.smallest(share.denominator if Role.ADV in lane.duties else 1)


def _rows(request: PlanRequest, batch_size: int) -> tuple[PlanRow, ...]:
    vanilla = _fastest(request, "vanilla", Layout.lane_of("clean", METHODS["vanilla"].duties), batch_size)
    assert vanilla is not None
    possible = (pair for pair in _combinations(request) if _obstacle(request, *pair) is None)
    rows = [row for pair in possible if (row := _fastest(request, *pair, batch_size))]
    best: dict[str, PlanRow] = {}
    for row in rows:
        best[row.method] = min(best.get(row.method, row), row, key=preference)
    return tuple(
        replace(
            row,
            time_ratio=row.step_seconds / vanilla.step_seconds,
            cost_ratio=row.device_hours / vanilla.device_hours,
            best=row is best[row.method],
        )
        for row in rows
    )


def _fastest(request: PlanRequest, method: str, lane: Layout, batch_size: int) -> PlanRow | None:
    """The row with the shortest step over the possible numbers of lanes; None: none is possible."""
    counts = fitting_lanes(request, lane, batch_size)
    return min(
        (evaluate(request, method, str(lane), count, batch_size) for count in counts), key=preference, default=None
    )


def fitting_lanes(request: PlanRequest, lane: Layout, batch_size: int, share: Fraction | None = None) -> list[int]:
    """The numbers of lanes that fit the machine and divide the chunks of a batch equally."""
    chunks, fewest = batch_size // request.chunk_size, _fewest(lane, share or request.share)
    most = request.machine.devices // lane.world_size
    return [count for count in _divisors(chunks // fewest) if count <= most] if chunks % fewest == 0 else []


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def preference(row: PlanRow) -> tuple[float, int]:
    """Sort key: the shorter step, then fewer ranks; times are rounded, so that equal ones compare equal."""
    return float(f"{row.step_seconds:.9g}"), row.ranks


def _stops_paying(rows: list[PlanRow]) -> int | None:
    if not rows:
        return None
    enough = (1 - PAYS) * max(row.images_per_second for row in rows)
    first = next(row for row in rows if row.images_per_second >= enough)
    return None if first is rows[-1] else first.batch_size
