"""A plan as text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .network import Link
from .planner import PAYS, Plan
from .row import PlanRow
from .search import Search


def render(plan: Plan) -> str:
    """The inputs, one row per method and layout, the bandwidth of the hand-off, and where the batch stops paying."""
    parts = [_inputs(plan), _rows(plan), _where_time_goes(plan), _handoffs(plan), _by_nodes(plan), _by_batch(plan)]
    if plan.left_out:
        lines = (f'  {entry.method} "{entry.layout}": {entry.reason}' for entry in plan.left_out)
        parts.append("\n".join(("Left out", *lines)))
    return "\n\n".join(part for part in parts if part)


def render_search(found: Search) -> str:
    """The best layout of each method and share, and the step time by number of devices."""
    wanted = "the shortest step"
    if found.request.deadline is not None:
        wanted = f"the fewest devices that train in {found.request.deadline:g} hours"
    best = columns([list(_SEARCHED), *map(_searched, found.best)])
    frontier = columns([list(_SEARCHED), *map(_searched, found.frontier)])
    devices = found.request.machine.devices
    notes = "share: of the chunks with twins; idle: of the ranks' time. A smaller share learns from fewer twins."
    return f"Best on {devices} devices: {wanted}\n{best}\n{notes}\n\nStep time against devices\n{frontier}"


def _searched(row: PlanRow) -> list[str]:
    return [cell.format(row, ms=1e3 * row.step_seconds, idle=1 - row.busy) for cell in _SEARCHED.values()]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align a header and rows in columns: text to the left, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    to_right = [all(_is_number(row[place]) for row in rows[1:]) for place in range(len(rows[0]))]
    rule = ["─" * width for width in widths]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_right, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    """Whether a cell holds a number or a placeholder for one."""
    return cell in ("", "-", "never", "calibrated") or cell.lstrip("+-")[:1].isdigit()


def _inputs(plan: Plan) -> str:
    request = plan.request
    machine, times = request.machine, request.times
    links = (f"inside {_link(machine.inside)}", f"between {_link(machine.between)}")
    passes = f"forward {1e3 * times.forward:.3g}, input-backward {1e3 * times.input_backward:.3g}, "
    passes += f"weight-backward {1e3 * times.weight_backward:.3g} ms per image, {1e3 * times.overhead:.3g} ms per pass"
    return "\n".join(
        (
            f"Batch   {request.batch_size} in chunks of {request.chunk_size}, {request.epochs:g} epochs of "
            f"{request.data_size} images: {request.steps(request.batch_size)} steps",
            f"Machine {machine.nodes} × {machine.devices_per_node} devices; {'; '.join(links)}",
            f"Device  {passes}",
            f"Reduce  {request.gradient_size / 1e6:.4g} MB in {request.buckets} bucket{'s' * (request.buckets > 1)}, "
            f"{request.algorithm}, {request.overlap:.0%} can overlap; "
            f"jitter {request.jitter:.2%} of a rank's work",
        )
    )


def _link(link: Link) -> str:
    bandwidth = "any bandwidth" if math.isinf(link.bandwidth) else f"{link.bandwidth / 1e9:.3g} GB/s"
    return f"{1e6 * link.latency:.3g} µs, {bandwidth}"


_ROW = {
    "method": "{0.method}", "layout": "{0.layout}", "lanes": "{0.lanes}", "ranks": "{0.ranks}", "idle": "{0.idle}",
    "at most": "{0.ranks_at_most}", "ms/step": "{ms:.4g}", "images/s": "{0.images_per_second:.0f}",
    "hours": "{0.hours:.3g}", "device-h": "{0.device_hours:.4g}", "time ×": "{0.time_ratio:.2f}",
    "cost ×": "{0.cost_ratio:.2f}", "busy": "{0.busy:.0%}", "": "{best}",
}  # fmt: skip
_SEARCHED = {
    "method": "{0.method}", "share": "{0.twin_share}", "layout": "{0.layout}", "lanes": "{0.lanes}",
    "ranks": "{0.ranks}", "ms/step": "{ms:.4g}", "hours": "{0.hours:.3g}", "device-h": "{0.device_hours:.4g}",
    "idle": "{idle:.0%}",
}  # fmt: skip
# The parts of a step, as they are shown and as the fields of a row begin.
PARTS = {"compute": "compute", "reduction": "reduction", "hand-off": "handoff", "stragglers": "straggler"}


def _rows(plan: Plan) -> str:
    rows = [
        [cell.format(row, ms=1e3 * row.step_seconds, best="← best" if row.best else "") for cell in _ROW.values()]
        for row in plan.rows
    ]
    note = "× to vanilla on the same machine; at most: ranks beyond which this batch gives no more work"
    return f"{columns([list(_ROW), *rows])}\n{note}"


def _where_time_goes(plan: Plan) -> str:
    rows = [["ms per step (best layouts)", *PARTS]]
    for row in plan.rows:
        if row.best:
            parts = (1e3 * getattr(row, f"{part}_seconds") for part in PARTS.values())
            rows.append([f"{row.method}  {row.layout}", *(f"{part:.3g}" for part in parts)])
    return columns(rows)


def _handoffs(plan: Plan) -> str:
    header = ("hand-off of a lane", "MB per step", "over", "MB/s as bytes", "floats", "hidden from MB/s", "floats")
    rows: list[tuple[str, ...]] = [header]
    for row in plan.rows:
        if need := row.handoff:
            rates = (need.load_as_bytes, need.load_as_floats, need.hides_as_bytes, need.hides_as_floats)
            over = "nodes" if need.crosses_nodes else "node"
            name = f"{row.method}  {row.layout}"
            rows.append((name, _megabytes(need.bytes_per_step), over, *map(_megabytes, rates)))
    return columns(rows) if len(rows) > 1 else ""


def _megabytes(size: float | None) -> str:
    if size is None:
        return "never"
    return f"{size / 1e6:.0f}" if size > 1e9 else f"{size / 1e6:.3g}"


def _by_nodes(plan: Plan) -> str:
    methods = plan.request.methods
    by_place = {(row.method, row.ranks + row.idle): row for row in plan.by_nodes}
    rows = [["hours (device-hours) by devices", *methods]]
    for devices in sorted({devices for _, devices in by_place}):
        rows.append([str(devices), *(_hours(by_place.get((method, devices))) for method in methods)])
    return columns(rows) + "\n* roles on ranks of their own"


def _hours(row: PlanRow | None) -> str:
    if row is None:
        return "-"
    return f"{row.hours:.3g} ({row.device_hours:.3g})" + ("*" if len(row.roles) > 1 else " ")


def _by_batch(plan: Plan) -> str:
    speeds = {(row.method, row.batch_size): f"{row.images_per_second:.0f}" for row in plan.by_batch}
    rows = [["images/s, best layout", *plan.request.methods]]
    for size in plan.request.batches():
        rows.append([str(size), *(speeds.get((method, size), "-") for method in plan.request.methods)])
    rows.append(["stops paying at", *(str(size or "-") for size in plan.stops_paying.values())])
    note = f"stops paying: no batch of the table is faster by more than {PAYS / (1 - PAYS):.0%}"
    return f"{columns(rows)}\n{note}"
