"""Predicted beside measured: the ratios of `conadv bench layout --json`, one chunk a rank and duty."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from .cost import Method
from .path import METHODS, parse_layout
from .request import PlanRequest
from .row import evaluate
from .table import columns

# The layout in which a method is measured, unless its name is that of vanilla on some ranks.
_LAYOUTS: dict[Method, str] = {
    "vanilla": "clean",
    "disadv": "clean | adv+attack",
    "conadv": "clean | adv | attack",
    "recycled": "clean | adv",
}
_TERM = rf"({'|'.join(METHODS)})(?:-(\d+))?"
_NAME = re.compile(f"{_TERM}/{_TERM}")


@dataclass(frozen=True)
class Comparison:
    """A measured ratio of times a step, with its spread, and the predicted one."""

    name: str
    predicted: float
    measured: float
    low: float
    high: float
    n: int

    @property
    def deviation(self) -> float:
        """Percent of the measured ratio."""
        return 100 * (self.predicted / self.measured - 1)

    @property
    def within_spread(self) -> bool:
        return self.low <= self.predicted <= self.high

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"deviation": self.deviation, "within_spread": self.within_spread}


def compare_layouts(request: PlanRequest, document: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Each result "METHOD[-RANKS]/METHOD[-RANKS]" of a measurement; other names are passed over.

    RANKS is by default those of one lane: recycled/vanilla-2 is recycled "clean | adv" on 2 ranks against vanilla
    data-parallel on 2. Every rank has one chunk of `request.chunk_size` images, as in the measurement.
    """
    found = []
    for entry in document["results"]:
        match = _NAME.fullmatch(str(entry.get("name")))
        if match is None:
            continue
        above, above_ranks, below, below_ranks = match.groups()
        predicted = _step(request, cast(Method, above), above_ranks) / _step(request, cast(Method, below), below_ranks)
        found.append(_comparison(entry, predicted))
    if not found:
        raise ValueError("no ratio of two methods among the results: give a file written by conadv bench layout --json")
    return tuple(found)


def render_comparison(comparisons: tuple[Comparison, ...]) -> str:
    rows: list[tuple[str, ...]] = [("ratio", "predicted", "measured", "low", "high", "n", "off", "within the spread")]
    for entry in comparisons:
        numbers = (f"{value:.3f}" for value in (entry.predicted, entry.measured, entry.low, entry.high))
        within = "yes" if entry.within_spread else "no"
        rows.append((entry.name, *numbers, str(entry.n), f"{entry.deviation:+.1f} %", within))
    return columns(rows)


def _step(request: PlanRequest, method: Method, ranks: str | None) -> float:
    layout = _LAYOUTS[method]
    width = len(parse_layout(layout))
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
        if not 0 < ratio < math.inf:
            raise ValueError
        return Comparison(entry["name"], predicted, ratio, low, high, int(entry["n"]))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f'the result "{entry["name"]}" needs numbers ratio (above 0), low, high and n') from None
