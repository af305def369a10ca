"""A plan as a picture: throughput over the batch, hours over the machine, and where the time of a step goes."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from conadv.core.catalog import METHODS
from conadv.train.files import replace_file, writing

from .planner import Plan

# Colours: Okabe and Ito's, with markers and dashes for those who do not see them; in the order of the methods.
_STYLES = (
    ("#000000", "o", "-"),
    ("#D55E00", "s", "-"),
    ("#0072B2", "^", "--"),
    ("#009E73", "D", ":"),
    ("#CC79A7", "v", "-."),
    ("#E69F00", "P", "-"),
    ("#56B4E9", "X", "--"),
)
_PARTS = (
    ("compute", "compute_seconds", "#0072B2", ""),
    ("reduction", "reduction_seconds", "#E69F00", "//"),
    ("hand-off", "handoff_seconds", "#009E73", ".."),
    ("stragglers", "straggler_seconds", "#CC79A7", "xx"),
)
_FORMATS = ("png", "svg", "pdf")


def plot(plan: Plan, path: Path) -> None:
    """Write the picture, in the format that the file's name ends in."""
    form = path.suffix.lstrip(".").lower()
    if form not in _FORMATS:
        raise ValueError(f"cannot draw {path}: give a name that ends in {', '.join('.' + known for known in _FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw {path}: there is no folder {path.parent}; make it first")
    figure = _figure()
    batches, machines, parts = figure.subplots(1, 3)
    _draw_batches(plan, batches)
    _draw_machines(plan, machines)
    _draw_parts(plan, parts)
    picture = BytesIO()
    figure.savefig(picture, format=form, dpi=150)
    with writing(path):
        replace_file(path, picture.getvalue())


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'conadv[plots]'") from None
    return Figure(figsize=(18, 5), layout="constrained")


def _draw_batches(plan: Plan, axes: Any) -> None:
    for method in plan.request.methods:
        rows = [row for row in plan.by_batch if row.method == method]
        _line(axes, method, [row.batch_size for row in rows], [row.images_per_second for row in rows])
        stop = plan.stops_paying[method]
        if stop is not None:
            axes.axvline(stop, color=_style(method)[0], linestyle=":", linewidth=1)
    axes.set(xlabel="batch size", ylabel="images per second, best layout")
    axes.set_title(f"{plan.request.machine.devices} devices; dotted: the batch stops paying")
    _logarithmic(axes)


def _draw_machines(plan: Plan, axes: Any) -> None:
    for method in plan.request.methods:
        rows = [row for row in plan.by_nodes if row.method == method]
        _line(axes, method, [row.ranks + row.idle for row in rows], [row.hours for row in rows])
    axes.axvline(plan.request.machine.devices, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="devices", ylabel="hours, best layout")
    axes.set_title(f"batch {plan.request.batch_size}; dotted: the machine of the request")
    _logarithmic(axes)


def _style(method: str) -> tuple[str, str, str]:
    return _STYLES[list(METHODS).index(method) % len(_STYLES)]


def _line(axes: Any, method: str, across: list[int], up: list[float]) -> None:
    colour, marker, dashes = _style(method)
    axes.plot(across, up, color=colour, marker=marker, linestyle=dashes, markersize=4, label=method)


def _logarithmic(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", rotation=45)
    axes.set_yscale("log")
    axes.legend()


def _draw_parts(plan: Plan, axes: Any) -> None:
    names = [f"{row.method}\n{row.layout}" + (" (best)" if row.best else "") for row in plan.rows]
    start = [0.0] * len(names)
    for label, field, colour, hatch in _PARTS:
        widths = [1e3 * getattr(row, field) for row in plan.rows]
        axes.barh(names, widths, left=start, color=colour, hatch=hatch, edgecolor="white", label=label)
        start = [total + width for total, width in zip(start, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.set_title(f"batch {plan.request.batch_size}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(_PARTS), frameon=False)
