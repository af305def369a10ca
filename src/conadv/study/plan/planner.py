"""From a request to a plan: each method in each layout on as many lanes as pay, over batch sizes and machine sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from .cost import Method
from .path import fits, parse_layout
from .request import PlanRequest
from .row import PlanRow, evaluate

# A batch stops paying where the largest one of the sweep is faster by no more than this.
PAYS = 0.05


@dataclass(frozen=True)
class LeftOut:
    """A layout that was not planned, and why."""

    method: Method
    layout: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The answer: a row a method and layout, and the best rows of each method for other batches and machines."""

    request: PlanRequest
    rows: tuple[PlanRow, ...]
    left_out: tuple[LeftOut, ...]
    by_batch: tuple[PlanRow, ...]
    by_nodes: tuple[PlanRow, ...]
    """Machines of 1, 2, 4, … nodes, up to the one for which the batch has no more work."""
    stops_paying: dict[Method, int | None]
    """The batch size; None: the largest batch of the sweep still pays."""

    def to_json(self) -> dict[str, Any]:
        """One object with the inputs and a list of rows."""
        return {
            "inputs": self.request.to_json(),
            "rows": [asdict(row) for row in self.rows],
            "left_out": [asdict(entry) for entry in self.left_out],
            "by_batch": [asdict(row) for row in self.by_batch],
            "by_nodes": [asdict(row) for row in self.by_nodes],
            "stops_paying": dict(self.stops_paying),
        }

    def best(self, method: Method) -> PlanRow | None:
        """The fastest row of a method; None if no layout of it fits the machine."""
        return next((row for row in self.rows if row.method == method and row.best), None)


def plan(request: PlanRequest) -> Plan:
    """How each method would run on the machine; a layout that does not fit it is left out, with the reason."""
    left_out = tuple(_left_out(request))
    if len(left_out) == sum(1 for _ in _combinations(request)):
        raise ValueError(f"no layout fits: {left_out[0].layout} {left_out[0].reason}; add devices or a layout")
    rows = _rows(request, request.batch_size)
    by_batch = tuple(row for size in request.batches() for row in _rows(request, size) if row.best)
    by_nodes = tuple(row for machine in _machines(request) for row in _rows(machine, request.batch_size) if row.best)
    stops = {method: _stops_paying([row for row in by_batch if row.method == method]) for method in request.methods}
    return Plan(request, rows, left_out, by_batch, by_nodes, stops)


def _machines(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request for machines of other sizes."""
    machine = request.machine
    widest = max(len(parse_layout(layout)) for _, layout in _combinations(request))
    most = max(machine.nodes, machine.nodes_for(widest * request.batch_size // request.chunk_size))
    doublings = {1 << power for power in range((most - 1).bit_length() + 1)}
    for nodes in sorted(doublings | {machine.nodes}):
        yield replace(request, machine=replace(machine, nodes=nodes))


def _combinations(request: PlanRequest) -> Iterator[tuple[Method, str]]:
    for method in request.methods:
        for layout in request.layouts:
            if fits(method, parse_layout(layout)):
                yield method, layout


def _left_out(request: PlanRequest) -> Iterator[LeftOut]:
    for method, layout in _combinations(request):
        reason = _obstacle(request, method, layout)
        if reason is not None:
            yield LeftOut(method, layout, reason)


def _obstacle(request: PlanRequest, method: Method, layout: str) -> str | None:
    width = len(parse_layout(layout))
    if width > request.machine.devices:
        return f"needs {width} devices, and the machine has {request.machine.devices}"
    if method == "recycled" and request.attack_steps > 1:
        return f"takes one step of attack, and {request.attack_steps} were asked for"
    return None


def _rows(request: PlanRequest, batch_size: int) -> tuple[PlanRow, ...]:
    vanilla = _fastest(request, "vanilla", "clean", batch_size)
    rows = [
        _fastest(request, method, layout, batch_size)
        for method, layout in _combinations(request)
        if _obstacle(request, method, layout) is None
    ]
    best: dict[Method, PlanRow] = {}
    for row in rows:
        best[row.method] = min(best.get(row.method, row), row, key=_preference)
    return tuple(
        replace(
            row,
            time_ratio=row.step_seconds / vanilla.step_seconds,
            cost_ratio=row.device_hours / vanilla.device_hours,
            best=row is best[row.method],
        )
        for row in rows
    )


def _fastest(request: PlanRequest, method: Method, layout: str, batch_size: int) -> PlanRow:
    """The number of lanes, of those that share the chunks equally, with the shortest step."""
    width = len(parse_layout(layout))
    chunks = batch_size // request.chunk_size
    most = min(chunks, request.machine.devices // width)
    lanes = (count for count in range(1, most + 1) if chunks % count == 0)
    return min((evaluate(request, method, layout, count, batch_size) for count in lanes), key=_preference)


def _preference(row: PlanRow) -> tuple[float, int]:
    """The shorter step, then fewer ranks; times that differ by rounding alone are one."""
    return float(f"{row.step_seconds:.9g}"), row.ranks


def _stops_paying(rows: list[PlanRow]) -> int | None:
    if not rows:
        return None
    enough = (1 - PAYS) * max(row.images_per_second for row in rows)
    first = next(row for row in rows if row.images_per_second >= enough)
    return None if first is rows[-1] else first.batch_size
