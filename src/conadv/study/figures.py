"""Figures of a report as SVG, on no background: the page inverts them for dark screens."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from .compare import ACCURACY, ROBUST, interval, shown, word

MOST_LINES = 8
"""As many lines as can be told apart."""

_STYLE = Path(__file__).with_name("report.mplstyle")
_WIDTH = 5.2  # inches: on a phone, letters are then still legible
_MARKERS = "osD^vP*X"
_LONGEST = 56  # characters
_LEGEND = (
    "Hollow: every run. Filled: the mean over the seeds. Bar: the 95 % confidence interval of the mean (Student's t)."
)


@dataclass(frozen=True)
class Plot:
    """A figure of the page: SVG as a data URI."""

    uri: str
    caption: str


def names(table: pd.DataFrame) -> dict[str, str]:
    """The metrics of cells or conditions that are shown, with their names."""
    kind = "held-out" if table.held_out.any() else "test"
    known = {ACCURACY: f"{kind} accuracy, %", ROBUST: "robust accuracy, %"}
    return {metric: name for metric, name in known.items() if table[metric].notna().any()}


@matplotlib.rc_context(fname=_STYLE)
def dots(cells: pd.DataFrame, labels: Sequence[str]) -> Plot:
    """Every run as a hollow dot, with the mean of each condition and its 95 % interval."""
    metrics = names(cells)
    figure = Figure(figsize=(_WIDTH, 0.75 + 0.46 * len(labels)))
    for axis, metric in zip(figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0], metrics, strict=True):
        for place, label in enumerate(labels):
            values = cells[cells.label == label][metric].dropna()
            if len(values) > 1:
                axis.plot(interval(values), (place, place), "C0", linewidth=2.2, alpha=0.55, solid_capstyle="butt")
            axis.plot(values, [place] * len(values), "C0o", markerfacecolor="none", markersize=4.5)
            if len(values):
                axis.plot([values.mean()], [place], "C0D", markersize=5)
        known = cells[cells.label.isin(labels)][metric].dropna()
        margin = 0.25 * ((known.max() - known.min()) or 1.0)
        axis.set(xlabel=metrics[metric], xlim=(known.min() - margin, known.max() + margin))
        axis.grid(axis="y", visible=False)
        axis.spines.left.set_visible(False)
    first = figure.axes[0]
    first.set(yticks=[], ylim=(len(labels) - 0.4, -0.75))
    for place, label in enumerate(labels):
        first.annotate(_cut(label), (0, place - 0.24), xycoords=("axes fraction", "data"), va="bottom")
    return _plot(figure, f"{_LEGEND} A bar is cut off at the edge of the figure, and a single run has none.")


def by_setting(cells: pd.DataFrame) -> list[Plot]:
    """Accuracy against each number that takes three or more values within an arm, everything else equal."""
    known = cells[cells.place.notna()]
    known = known[known.groupby(["axis", "arm"]).place.transform("nunique") > 2]
    return [_setting(str(key), own) for key, own in known.groupby("axis", sort=False)]


@matplotlib.rc_context(fname=_STYLE)
def _setting(key: str, cells: pd.DataFrame) -> Plot:
    ticks, arms = sorted(cells.place.unique()), list(cells.arm.unique())[:MOST_LINES]
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
    first = f" The first {MOST_LINES} arms." if len(arms) < cells.arm.nunique() else ""
    return _plot(figure, f"Accuracy by {word(key)}. {_LEGEND}{first}")


@matplotlib.rc_context(fname=_STYLE)
def lines(curves: pd.DataFrame, labels: Sequence[str], column: str, name: str, caption: str) -> Plot:
    """Curves by epoch, one for each label."""
    figure = Figure(figsize=(_WIDTH, 3.4))
    axis = figure.subplots()
    for label in labels:
        own = curves[curves.label == label]
        axis.plot(own.epoch, own[column], label=_cut(label))
    axis.set(xlabel="epoch", ylabel=name)
    figure.legend(loc="outside lower center", ncols=2 if max(map(len, labels)) < 28 else 1)
    return _plot(figure, caption)


def _cut(label: str) -> str:
    """As much of a label as fits the width of a figure."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def _plot(figure: Figure, caption: str) -> Plot:
    data = BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None})
    return Plot(f"data:image/svg+xml;base64,{base64.b64encode(data.getvalue()).decode()}", caption)
