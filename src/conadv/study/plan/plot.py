"""A plan as a picture: throughput by batch size, hours by machine, and the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from conadv.core.catalog import METHODS
from conadv.trainer.files import replace_file, writing

from .planner import Plan
from .row import PlanRow
from .table import PARTS

# Okabe and Ito's colours, with markers and dashes for colour-blind readers, in the order of the methods.
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS, _DASHES = "os^DvPX", ("-", "-", "--", ":", "-.", "-", "--")
_PART_COLOURS, _PART_HATCHES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), ("", "//", "..", "xx")
_FORMATS = (".png", ".svg", ".pdf")


def plot(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of the file selects the format."""
    if path.suffix.lower() not in _FORMATS:
        raise ValueError(f"cannot draw {path}: give a name that ends in {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot draw {path}: there is no folder {path.parent}; create it first")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'conadv[plots]'") from None
    figure = Figure(figsize=(18, 5), layout="constrained")
    by_batch, by_machine, parts = figure.subplots(1, 3)
    devices, batch_size = plan.request.machine.devices, plan.request.batch_size
    _draw_lines(by_batch, plan.by_batch, lambda row: row.batch_size, lambda row: row.images_per_second)
    by_batch.set(xlabel="batch size", ylabel="images per second, best layout")
    by_batch.set_title(f"{devices} devices; dotted: the batch stops paying")
    for method, stop in plan.stops_paying.items():
        if stop is not None:
            by_batch.axvline(stop, color=_COLOURS[_number(method)], linestyle=":", linewidth=1)
    _draw_lines(by_machine, plan.by_nodes, lambda row: row.ranks + row.idle, lambda row: row.hours)
    by_machine.set(xlabel="devices", ylabel="hours, best layout")
    by_machine.set_title(f"batch {batch_size}; dotted: the machine of the request")
    by_machine.axvline(devices, color="grey", linestyle=":", linewidth=1)
    _draw_parts(parts, plan.rows)
    parts.set_title(f"batch {batch_size}")
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=150)
    with writing(path):
        replace_file(path, picture.getvalue())


def _number(method: str) -> int:
    return list(METHODS).index(method) % len(_COLOURS)


def _draw_lines(
    axes: Any, rows: Sequence[PlanRow], across: Callable[[PlanRow], int], up: Callable[[PlanRow], float]
) -> None:
    """One line per method, on logarithmic axes."""
    for method in dict.fromkeys(row.method for row in rows):
        number, own = _number(method), [row for row in rows if row.method == method]
        style = {"color": _COLOURS[number], "marker": _MARKERS[number], "linestyle": _DASHES[number], "markersize": 4}
        axes.plot(list(map(across, own)), list(map(up, own)), label=method, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", rotation=45)
    axes.set_yscale("log")
    axes.legend()


def _draw_parts(axes: Any, rows: Sequence[PlanRow]) -> None:
    """One stacked bar per row, with the parts of its step."""
    names = [f"{row.method}\n{row.layout}" + (" (best)" if row.best else "") for row in rows]
    widths = [[1e3 * getattr(row, f"{part}_seconds") for part in PARTS.values()] for row in rows]
    starts = [[0.0, *accumulate(parts)] for parts in widths]
    for place, label in enumerate(PARTS):
        left, width = ([parts[place] for parts in table] for table in (starts, widths))
        style = {"color": _PART_COLOURS[place], "hatch": _PART_HATCHES[place], "edgecolor": "white"}
        axes.barh(names, width, left=left, label=label, **style)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(PARTS), frameon=False)
