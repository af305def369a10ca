"""A plan as text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .network import Link
from .planner import PAYS, Plan
from .row import PlanRow


def render(plan: Plan) -> str:
    """The inputs, one row per method and layout, what the hand-off needs, and where the batch stops paying."""
    parts = [_inputs(plan), _rows(plan), _where_time_goes(plan), _handoffs(plan), _by_nodes(plan), _by_batch(plan)]
    if plan.left_out:
        lines = (f'  {entry.method} "{entry.layout}": {entry.reason}' for entry in plan.left_out)
        parts.append("\n".join(("Left out", *lines)))
    return "\n\n".join(part for part in parts if part)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length under a header: text to the left, numbers to the right."""
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
    """A number, or what stands in place of one."""
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
            f"Reduce  {request.gradient_size / 1e6:.4g} MB, {request.algorithm}, {request.overlap:.0%} can overlap; "
            f"jitter {request.jitter:.2%} of a rank's work",
        )
    )


def _link(link: Link) -> str:
    bandwidth = "any bandwidth" if math.isinf(link.bandwidth) else f"{link.bandwidth / 1e9:.3g} GB/s"
    return f"{1e6 * link.latency:.3g} µs, {bandwidth}"


def _rows(plan: Plan) -> str:
    header = ("method", "layout", "lanes", "ranks", "idle", "at most", "ms/step", "images/s", "hours", "device-h")
    rows = [(*header, "time ×", "cost ×", "busy", "")]
    for row in plan.rows:
        rows.append(
            (
                row.method,
                row.layout,
                str(row.lanes),
                str(row.ranks),
                str(row.idle),
                str(row.ranks_at_most),
                f"{1e3 * row.step_seconds:.4g}",
                f"{row.images_per_second:.0f}",
                f"{row.hours:.3g}",
                f"{row.device_hours:.4g}",
                f"{row.time_ratio:.2f}",
                f"{row.cost_ratio:.2f}",
                f"{row.busy:.0%}",
                "← best" if row.best else "",
            )
        )
    return (
        columns(rows) + "\n× to vanilla on the same machine; at most: ranks beyond which this batch gives no more work"
    )


def _where_time_goes(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [("ms per step (best layouts)", "compute", "reduction", "hand-off", "stragglers")]
    for row in plan.rows:
        if row.best:
            parts = (row.compute_seconds, row.reduction_seconds, row.handoff_seconds, row.straggler_seconds)
            rows.append((f"{row.method}  {row.layout}", *(f"{1e3 * part:.3g}" for part in parts)))
    return columns(rows)


def _handoffs(plan: Plan) -> str:
    header = ("hand-off of a lane", "MB per step", "over", "MB/s as bytes", "floats", "hidden from MB/s", "floats")
    rows = [header, *(_handoff(row) for row in plan.rows if row.handoff is not None)]
    return columns(rows) if len(rows) > 1 else ""


def _handoff(row: PlanRow) -> tuple[str, ...]:
    need = row.handoff
    assert need is not None
    rates = (need.load_as_bytes, need.load_as_floats, need.hides_as_bytes, need.hides_as_floats)
    over = "nodes" if need.crosses_nodes else "node"
    return (f"{row.method}  {row.layout}", _megabytes(need.bytes_per_step), over, *map(_megabytes, rates))


def _megabytes(size: float | None) -> str:
    if size is None:
        return "never"
    return f"{size / 1e6:.0f}" if size > 1e9 else f"{size / 1e6:.3g}"


def _by_nodes(plan: Plan) -> str:
    methods = plan.request.methods
    by_place = {(row.method, row.ranks + row.idle): row for row in plan.by_nodes}
    rows: list[tuple[str, ...]] = [("hours (device-hours) by devices", *methods)]
    for devices in sorted({devices for _, devices in by_place}):
        rows.append((str(devices), *(_hours(by_place.get((method, devices))) for method in methods)))
    return columns(rows) + "\n* roles on ranks of their own"


def _hours(row: PlanRow | None) -> str:
    if row is None:
        return "-"
    return f"{row.hours:.3g} ({row.device_hours:.3g})" + ("*" if len(row.roles) > 1 else " ")


def _by_batch(plan: Plan) -> str:
    methods = plan.request.methods
    by_place = {(row.method, row.batch_size): row for row in plan.by_batch}
    rows = [("images/s, best layout", *methods)]
    for batch_size in plan.request.batches():
        found = (by_place.get((method, batch_size)) for method in methods)
        rows.append((str(batch_size), *("-" if row is None else f"{row.images_per_second:.0f}" for row in found)))
    stops = [("stops paying at", *(_stop(plan, method) for method in methods))]
    note = f"\nstops paying: no batch of the table is faster by more than {PAYS / (1 - PAYS):.0%}"
    return columns(rows + stops) + note


def _stop(plan: Plan, method: str) -> str:
    size = plan.stops_paying[method]
    return "-" if size is None else str(size)
