"""`conadv plan`: a flag for each input, and what is printed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from conadv.flags import flag, with_flags
from conadv.setting import descriptions, settings_of

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
    json_: Annotated[bool, Parameter(name="--json", help="Print one JSON object.", negative="")] = False,
    plot: Annotated[Path | None, Parameter(help="Draw it too: a .png, .svg or .pdf.")] = None,
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
    request = PlanRequest(**(given | _parsed(inputs)))
    if compare is not None:
        rows = compare_layouts(request, read_measurement(compare))
        print(json.dumps({"rows": [row.to_json() for row in rows]}) if json_ else render_comparison(rows))
        return
    if request.search:
        found = search(request)
        print(json.dumps(found.to_json()) if json_ else render_search(found))
        return
    made = plan(request)
    if plot is not None:
        draw(made, plot)
    print(json.dumps(made.to_json()) if json_ else render(made))


def _parsed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The values of the flags that were given."""
    settings = {setting.key: setting for setting in settings_of(PlanRequest)}
    given = {name: value for name, value in inputs.items() if value is not None}
    return {name: value if value is True else settings[name].parse(value) for name, value in given.items()}


def _flags() -> Iterator[inspect.Parameter]:
    texts = descriptions(PlanRequest.__module__)
    defaults = {field.name: field.default for field in fields(PlanRequest)}
    group = None
    for setting in settings_of(PlanRequest):
        name = setting.key
        if name in _GROUPS:
            group = Group(_GROUPS[name], sort_key=1 + list(_GROUPS).index(name))
        yield flag(setting, texts[f"PlanRequest.{name}"], _shown(defaults[name]), group, switch=setting.kind is bool)


def _shown(default: Any) -> str | None:
    """A default as one would write it after the flag."""
    if default is None or default is False or default == ():
        return None
    items = default if isinstance(default, tuple) else (default,)
    return " ".join(f'"{item}"' if " " in str(item) else str(item) for item in items)


command = with_flags(plan_command, _flags())
