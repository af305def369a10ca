"""`conadv plan`: its flags and its output."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from conadv.flags import Json, flags_of, parse_flags, with_flags

from .measured import compare_layouts, read_measurement, render_comparison, times_in
from .planner import plan
from .plot import plot as draw
from .request import PlanRequest
from .search import search
from .table import render, render_search

# The first field of each group of flags, and the title of the group.
_GROUPS = {"batch_size": "What is trained", "device": "The machine", "methods": "How"}


def plan_command(
    *,
    json: Json = False,
    plot: Annotated[Path | None, Parameter(help="Also draw the plan: a .png, .svg or .pdf file.")] = None,
    measured: Annotated[
        Path | None, Parameter(help="Take the times of passes from this output of `conadv bench step --json`.")
    ] = None,
    compare: Annotated[
        Path | None, Parameter(help="Compare predicted ratios with this output of `conadv bench layout --json`.")
    ] = None,
    **inputs: Any,
) -> None:
    """Estimate time and cost on a cluster: ranks by role, time per step, hours, and the cost of each method."""
    given = {} if measured is None else times_in(read_measurement(measured))
    request = PlanRequest(**(given | parse_flags(PlanRequest, inputs)))
    if compare is not None:
        rows = compare_layouts(request, read_measurement(compare))
        print(dumps({"rows": [asdict(row) for row in rows]}) if json else render_comparison(rows))
        return
    if request.search:
        found = search(request)
        print(dumps(found.to_json()) if json else render_search(found))
        return
    made = plan(request)
    if plot is not None:
        draw(made, plot)
    print(dumps(made.to_json()) if json else render(made))


command = with_flags(plan_command, flags_of(PlanRequest, _GROUPS))
