"""Figures of a report, each drawn for light and for dark pages."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from cycler import cycler
from matplotlib.figure import Figure

from .compare import ACCURACY, ROBUST, interval, shown, word

STYLE = Path(__file__).with_name("report.mplstyle")
MOST_LINES = 8
"""As many lines as can be told apart."""

_BRIGHT = ("#56B4E9", "#FF8C42", "#2FC295", "#EFA0CE", "#F2C14E", "#9FD3F5", "#C0A9E6", "#B0B0B0")
_WIDTH = 5.2  # inches: on a phone, letters are then still legible
# Of text, of grid lines, and of lines that the style file's colours would be too dark for.
_COLOURS = {"light": ("#1b1e23", "#d9dde3", None), "dark": ("#e4e7eb", "#3c424a", _BRIGHT)}
_MARKERS = "osD^vP*X"
_LONGEST = 56  # characters
_LEGEND = (
    "Hollow: every run. Filled: the mean over the seeds. Bar: the 95 % confidence interval of the mean (Student's t)."
)


@dataclass(frozen=True)
class Plot:
    """A figure of the page: SVG as data URIs."""

    light: str
    dark: str
    caption: str


def names(table: pd.DataFrame) -> dict[str, str]:
    """The metrics of cells or conditions that are shown, with their names."""
    kind = "held-out" if table.held_out.any() else "test"
    known = {ACCURACY: f"{kind} accuracy, %", ROBUST: "robust accuracy, %"}
    return {metric: name for metric, name in known.items() if table[metric].notna().any()}


def dots(cells: pd.DataFrame, labels: Sequence[str]) -> Plot:
    """Every run as a hollow dot, with the mean of each condition and its 95 % interval."""
    metrics = names(cells)

    def draw() -> Figure:
        figure = Figure(figsize=(_WIDTH, 0.75 + 0.46 * len(labels)))
        for axis, metric in zip(figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0], metrics, strict=True):
            for place, label in enumerate(labels):
                values = cells[cells.label == label][metric].dropna()
                _draw_row(axis, values, place)
            known = cells[cells.label.isin(labels)][metric].dropna()
            margin = 0.25 * ((known.max() - known.min()) or 1.0)
            axis.set(xlabel=metrics[metric], xlim=(known.min() - margin, known.max() + margin))
            axis.grid(axis="y", visible=False)
            axis.spines.left.set_visible(False)
        first = figure.axes[0]
        first.set(yticks=[], ylim=(len(labels) - 0.4, -0.75))
        for place, label in enumerate(labels):
            first.annotate(_cut(label), (0, place - 0.24), xycoords=("axes fraction", "data"), va="bottom")
        return figure

    return picture(draw, f"{_LEGEND} A bar is cut off at the edge of the figure, and a single run has none.")


def _draw_row(axis: Any, values: pd.Series, place: int) -> None:
    colour = "C0"
    if len(values) > 1:
        axis.plot(interval(values), (place, place), color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt")
    axis.plot(values, [place] * len(values), "o", markerfacecolor="none", markeredgecolor=colour, markersize=4.5)
    if len(values):
        axis.plot([values.mean()], [place], "D", color=colour, markersize=5)


def by_setting(cells: pd.DataFrame) -> list[Plot]:
    """Accuracy against each number that takes three or more values within an arm, everything else equal."""
    known = cells[cells.place.notna()]
    known = known[known.groupby(["axis", "arm"]).place.transform("nunique") > 2]
    return [_setting(str(key), own) for key, own in known.groupby("axis", sort=False)]


def _setting(key: str, cells: pd.DataFrame) -> Plot:
    ticks, arms = sorted(cells.place.unique()), list(cells.arm.unique())[:MOST_LINES]

    def draw() -> Figure:
        figure = Figure(figsize=(_WIDTH, 3.6))
        axis = figure.subplots()
        for number, arm in enumerate(arms):
            shift, colour = 0.08 * (number - (len(arms) - 1) / 2), f"C{number}"  # so that bars do not cover each other
            own = cells[cells.arm == arm]
            means = own.groupby("place")[ACCURACY].mean()
            spots = [ticks.index(place) + shift for place in means.index]
            bars = [mean - interval(own[own.place == place][ACCURACY])[0] for place, mean in means.items()]
            axis.errorbar(spots, means, bars, label=_cut(arm), marker=_MARKERS[number], color=colour, elinewidth=1)
            runs = [ticks.index(place) + shift for place in own.place]
            axis.plot(runs, own[ACCURACY], "o", markerfacecolor="none", color=colour, markersize=3)
        axis.set_xticks(range(len(ticks)), [shown(key, tick) for tick in ticks])
        axis.set(xlabel=word(key), ylabel=names(cells)[ACCURACY])
        figure.legend(loc="outside lower center", ncols=2)
        return figure

    first = f" The first {MOST_LINES} arms." if len(arms) < cells.arm.nunique() else ""
    return picture(draw, f"Accuracy by {word(key)}. {_LEGEND}{first}")


def lines(curves: pd.DataFrame, labels: Sequence[str], column: str, name: str, caption: str) -> Plot:
    """Curves by epoch, one for each label."""

    def draw() -> Figure:
        figure = Figure(figsize=(_WIDTH, 3.4))
        axis = figure.subplots()
        for label in labels:
            own = curves[curves.label == label]
            axis.plot(own.epoch, own[column], label=_cut(label))
        axis.set(xlabel="epoch", ylabel=name)
        figure.legend(loc="outside lower center", ncols=2 if max(map(len, labels)) < 28 else 1)
        return figure

    return picture(draw, caption)


def _cut(label: str) -> str:
    """As much of a label as fits the width of a figure."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def picture(draw: Callable[[], Figure], caption: str) -> Plot:
    """Draw a figure in both colour schemes."""
    return Plot(_uri(draw, *_COLOURS["light"]), _uri(draw, *_COLOURS["dark"]), caption)


def _uri(draw: Callable[[], Figure], ink: str, faint: str, bright: Sequence[str] | None) -> str:
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours: Any = {**dict.fromkeys(inks, ink), "grid.color": faint}
    colours |= {"axes.prop_cycle": cycler(color=bright)} if bright else {}
    data = BytesIO()
    with matplotlib.rc_context(fname=STYLE), matplotlib.rc_context(colours):
        draw().savefig(data, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}"
