"""Figures of a report, each drawn for light and for dark pages."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from cycler import cycler
from matplotlib.figure import Figure

from .compare import ROBUST, TOP1, interval, shown, word

STYLE = Path(__file__).with_name("report.mplstyle")
MOST_LINES = 8
"""As many lines as can be told apart."""
NAMES = {TOP1: "test accuracy, %", ROBUST: "robust accuracy, %"}
Curves = Mapping[str, Sequence[tuple[float, float]]]

_BRIGHT = ("#56B4E9", "#FF8C42", "#2FC295", "#EFA0CE", "#F2C14E", "#9FD3F5", "#C0A9E6", "#B0B0B0")
_WIDTH = 5.2  # inches: on a phone, letters are then still legible
# Of text, of grid lines, and of lines that the style file's colours would be too dark for.
_COLOURS = {"light": ("#1b1e23", "#d9dde3", None), "dark": ("#e4e7eb", "#3c424a", _BRIGHT)}
_MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Picture:
    """A figure of the page: SVG as data URIs."""

    light: str
    dark: str
    caption: str


def dots(cells: pd.DataFrame, labels: Sequence[str]) -> Picture:
    """Every run as a hollow dot, with the mean of each condition and its 95 % interval."""
    metrics = [metric for metric in NAMES if cells[metric].notna().any()]

    def draw() -> Figure:
        figure = Figure(figsize=(_WIDTH, 0.75 + 0.46 * len(labels)))
        for axis, metric in zip(figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0], metrics, strict=True):
            for place, label in enumerate(labels):
                values = cells[cells.label == label][metric].dropna()
                _draw_row(axis, values, place)
            known = cells[cells.label.isin(labels)][metric].dropna()
            margin = 0.25 * ((known.max() - known.min()) or 1.0)
            axis.set(xlabel=NAMES[metric], xlim=(known.min() - margin, known.max() + margin))
            axis.grid(axis="y", visible=False)
            axis.spines.left.set_visible(False)
        first = figure.axes[0]
        first.set(yticks=[], ylim=(len(labels) - 0.4, -0.75))
        for place, label in enumerate(labels):
            first.annotate(label, (0, place - 0.24), xycoords=("axes fraction", "data"), va="bottom")
        return figure

    caption = (
        "Hollow: every run. Filled: the mean over the seeds. Bar: the 95 % confidence interval of the mean (Student's "
        "t), cut off at the edge of the figure; a single run has none."
    )
    return picture(draw, caption)


def _draw_row(axis: Any, values: pd.Series, place: int) -> None:
    colour = "C0"
    if len(values) > 1:
        axis.plot(interval(values), (place, place), color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt")
    axis.plot(values, [place] * len(values), "o", markerfacecolor="none", markeredgecolor=colour, markersize=4.5)
    if len(values):
        axis.plot([values.mean()], [place], "D", color=colour, markersize=5)


def by_setting(cells: pd.DataFrame) -> list[Picture]:
    """Accuracy against each number that takes three or more values within an arm, everything else equal."""
    found: dict[str, dict[str, dict[float, pd.Series]]] = {}
    for arm, own in cells.groupby("arm", sort=False):
        several = {text: json.loads(text) for text in own.settings.unique()}
        keys = dict.fromkeys(key for settings in several.values() for key in settings)
        varied = [key for key in keys if len({str(settings.get(key)) for settings in several.values()}) > 1]
        numbers = [settings.get(varied[0]) for settings in several.values()] if len(varied) == 1 else []
        if len(numbers) > 2 and all(isinstance(one, int | float) for one in numbers):
            values = {one: own[own.settings == text][TOP1] for text, one in zip(several, numbers, strict=True)}
            found.setdefault(varied[0], {})[arm] = values
    return [_setting(key, arms) for key, arms in found.items()]


def _setting(key: str, arms: Mapping[str, Mapping[float, pd.Series]]) -> Picture:
    def draw() -> Figure:
        figure = Figure(figsize=(_WIDTH, 3.6))
        axis = figure.subplots()
        ticks = sorted({value for values in arms.values() for value in values})
        for number, (arm, values) in enumerate(list(arms.items())[:MOST_LINES]):
            places = sorted(values)
            means = [values[place].mean() for place in places]
            bars = [mean - interval(values[place])[0] for mean, place in zip(means, places, strict=True)]
            shift = 0.08 * (number - (min(len(arms), MOST_LINES) - 1) / 2)  # so that bars do not cover each other
            spots = [ticks.index(place) + shift for place in places]
            axis.errorbar(spots, means, bars, label=arm, marker=_MARKERS[number], color=f"C{number}", elinewidth=1)
            for spot, place in zip(spots, places, strict=True):
                runs = values[place]
                axis.plot([spot] * len(runs), runs, "o", markerfacecolor="none", color=f"C{number}", markersize=3)
        axis.set_xticks(range(len(ticks)), [shown(key, tick) for tick in ticks])
        axis.set(xlabel=word(key), ylabel=NAMES[TOP1])
        figure.legend(loc="outside lower center", ncols=2)
        return figure

    caption = (
        f"Test accuracy by {word(key)}. Hollow: every run. Filled: the mean over the seeds. Bar: the 95 % confidence "
        "interval of the mean (Student's t)."
    )
    caption += f" The first {MOST_LINES} arms." if len(arms) > MOST_LINES else ""
    return picture(draw, caption)


def lines(curves: Curves, name: str, caption: str) -> Picture:
    """Curves by epoch."""

    def draw() -> Figure:
        figure = Figure(figsize=(_WIDTH, 3.4))
        axis = figure.subplots()
        for label, curve in curves.items():
            axis.plot(*zip(*curve, strict=True), label=label)
        axis.set(xlabel="epoch", ylabel=name)
        figure.legend(loc="outside lower center", ncols=2 if max(map(len, curves)) < 28 else 1)
        return figure

    return picture(draw, caption)


def picture(draw: Callable[[], Figure], caption: str) -> Picture:
    """Draw a figure in both colour schemes."""
    return Picture(_uri(draw, *_COLOURS["light"]), _uri(draw, *_COLOURS["dark"]), caption)


def _uri(draw: Callable[[], Figure], ink: str, faint: str, bright: Sequence[str] | None) -> str:
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours: Any = {**dict.fromkeys(inks, ink), "grid.color": faint}
    colours |= {"axes.prop_cycle": cycler(color=bright)} if bright else {}
    data = BytesIO()
    with matplotlib.rc_context(fname=STYLE), matplotlib.rc_context(colours):
        draw().savefig(data, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}"
