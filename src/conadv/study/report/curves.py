"""The section with training curves: loss by epoch, and test accuracy where it was measured on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from conadv.study.results import Result

from .blocks import Figure, Section
from .conditions import Condition, figure_of
from .drawing import Axis, Point, Series, line_chart
from .evidence import Evidence

_BINS = 60
_MOST_LINES = 5

Trace = list[tuple[float, float]]
"""Pairs of epoch and figure."""


def curve_section(evidence: Evidence) -> Section | None:
    """None where the folders of the runs are gone."""
    traces = {id(one): [evidence.metrics(run) for run in one.runs] for one in evidence.shown}
    figures = [
        *_figure(evidence, "loss", "clean training loss", lambda one: _losses(traces[id(one)])),
        *_figure(evidence, "progress", "test accuracy, %", lambda one: _accuracies(one.runs, traces[id(one)])),
    ]
    return Section("curves", "Training curves", figures) if figures else None


def _figure(evidence: Evidence, slug: str, what: str, traces: Callable[[Condition], list[Trace]]) -> list[Figure]:
    series = []
    for condition in evidence.shown:
        points = _mean(traces(condition))
        if len(points) > 2:
            series.append(Series(evidence.name(condition), points))
    if not series:
        return []
    drawings = [
        line_chart(f"{slug}-{number}", f"{what} by epoch".capitalize(), part, Axis("epoch"), Axis(what))
        for number, part in enumerate(_parts(series), 1)
    ]
    caption = f"{what[0].upper()}{what[1:]} by epoch, the mean over the seeds of each arm."
    if len(drawings) > 1:
        caption += f" The first arm, {series[0].name}, is in every drawing."
    return [Figure(f"figure-{slug}", caption, drawings)]


def _parts(series: Sequence[Series]) -> list[Sequence[Series]]:
    """Few enough lines a drawing to be told apart, each beside the first."""
    first, *rest = series
    step = _MOST_LINES - 1
    return [[first, *rest[start : start + step]] for start in range(0, len(rest), step)] or [[first]]


def _losses(metrics: Sequence[Sequence[Mapping[str, Any]]]) -> list[Trace]:
    return [_trace(lines, "clean_loss") for lines in metrics]


def _accuracies(runs: Sequence[Result], metrics: Sequence[Sequence[Mapping[str, Any]]]) -> list[Trace]:
    """What was measured on the way, and the end, which the summary has."""
    traces = []
    for run, lines in zip(runs, metrics, strict=True):
        trace, last = _trace(lines, "test_top1"), figure_of(run, "test_top1")
        if trace and last is not None:
            traces.append([*trace, (float(lines[-1]["epoch"]), last)])
    return traces


def _trace(lines: Sequence[Mapping[str, Any]], name: str) -> Trace:
    return [(float(line["epoch"]), float(line[name])) for line in lines if _is_number(line.get(name))]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(traces: Sequence[Trace]) -> list[Point]:
    """One line: the mean within each of a number of equal parts of the way, over all traces."""
    last = max((epoch for trace in traces for epoch, _ in trace), default=0.0)
    parts: dict[int, Trace] = {}
    for trace in traces:
        for epoch, value in trace:
            parts.setdefault(min(_BINS - 1, int(_BINS * epoch / last)), []).append((epoch, value))
    return [
        Point(fmean(epoch for epoch, _ in part), fmean(value for _, value in part)) for _, part in sorted(parts.items())
    ]
