"""Read the output of `conadv bench`: times to plan with, and ratios to compare predictions with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conadv.core.catalog import METHODS

from .request import PlanRequest
from .row import evaluate
from .table import columns

_NEEDED = ("forward", "input_backward", "weight_backward")
# The results that a plan reads and the key under which each has its value.
_UNITS = dict.fromkeys((*_NEEDED, "pixel_backward"), "seconds_per_image") | {"overhead": "seconds", "update": "seconds"}
_CPU_BUCKET_MIB = 1.0  # as parallel/buckets.py, which needs torch
_TERM = rf"({'|'.join(METHODS)})(?:-([0-9]{{1,6}}))?"
_NAME = re.compile(f"{_TERM}/{_TERM}")


def read_measurement(path: Path) -> Mapping[str, Any]:
    """A file that `conadv bench --json` wrote: {"machine": {…}, "results": [{"name": …, …}, …]}."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} ({error}): give a file written by conadv bench --json") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): give a file written by conadv bench --json") from None
    results = document.get("results") if isinstance(document, dict) else None
    if not isinstance(results, list) or not all(isinstance(entry, dict) for entry in results):
        raise ValueError(f'{path} has no list "results" of objects: give a file written by conadv bench --json')
    return {**document}


def times_in(document: Mapping[str, Any]) -> dict[str, float]:
    """The measured times of passes, and on CPUs the bucket size, under the names of `PlanRequest`."""
    found: dict[str, float] = {}
    for entry in document["results"]:
        name = entry.get("name")
        unit = _UNITS.get(name) if isinstance(name, str) else None
        if unit is None:
            continue
        value = entry.get(unit)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f'the result "{name}" needs a number "{unit}": measure again with conadv bench step --json'
            )
        found[str(name)] = value
    if missing := [name for name in _NEEDED if name not in found]:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"the measurement has no {', '.join(missing)}: run conadv bench step --json, or give {flags}")
    machine = document.get("machine")
    if isinstance(machine, dict) and machine.get("gpu", "unknown") is None:
        found["bucket_mib"] = _CPU_BUCKET_MIB
    return found


@dataclass(frozen=True)
class Comparison:
    """A measured ratio of step times, with its spread, and the predicted one."""

    name: str
    predicted: float
    measured: float
    low: float
    high: float
    n: int
    deviation: float
    """Of the predicted ratio from the measured one, in percent."""
    within_spread: bool


def compare_layouts(request: PlanRequest, document: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Predict each measured ratio "METHOD[-RANKS]/METHOD[-RANKS]"; results with other names are ignored.

    RANKS is by default one lane: recycled/vanilla-2 is recycled "clean | adv" on 2 ranks against vanilla
    data-parallel on 2. Every rank has one chunk of `request.chunk_size` images, as in the measurement.
    """
    found = []
    for entry in document["results"]:
        match = _NAME.fullmatch(str(entry.get("name")))
        if match is None:
            continue
        above, above_ranks, below, below_ranks = match.groups()
        predicted = _step(request, above, above_ranks) / _step(request, below, below_ranks)
        found.append(_comparison(entry, predicted))
    if not found:
        raise ValueError("no ratio of two methods among the results: give a file written by conadv bench layout --json")
    return tuple(found)


def render_comparison(comparisons: tuple[Comparison, ...]) -> str:
    """A table of predicted and measured ratios."""
    rows: list[tuple[str, ...]] = [("ratio", "predicted", "measured", "low", "high", "n", "off", "within the spread")]
    for entry in comparisons:
        numbers = (f"{value:.3f}" for value in (entry.predicted, entry.measured, entry.low, entry.high))
        within = "yes" if entry.within_spread else "no"
        rows.append((entry.name, *numbers, str(entry.n), f"{entry.deviation:+.1f} %", within))
    return columns(rows)


def _step(request: PlanRequest, method: str, ranks: str | None) -> float:
    """Predicted seconds per step of a method, in the layout of the measurement."""
    layout = METHODS[method].overlapped
    width = layout.count("|") + 1
    lanes, rest = divmod(int(ranks) if ranks else width, width)
    if rest or lanes < 1:
        raise ValueError(
            f'{method} on {ranks} ranks: "{layout}" needs a multiple of {width}; correct the measured name'
        )
    batch_size = lanes * request.chunk_size
    sized = replace(request, batch_size=batch_size, data_size=max(request.data_size, batch_size), sweep=())
    return evaluate(sized, method, layout, lanes).step_seconds


def _comparison(entry: Mapping[str, Any], predicted: float) -> Comparison:
    try:
        ratio, low, high = (float(entry[key]) for key in ("ratio", "low", "high"))
        if not (0 < ratio < math.inf and math.isfinite(low) and math.isfinite(high)):
            raise ValueError
        off, within = 100 * (predicted / ratio - 1), low <= predicted <= high
        return Comparison(entry["name"], predicted, ratio, low, high, int(entry["n"]), off, within)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f'the result "{entry["name"]}" needs numbers ratio (above 0), low, high and n') from None
