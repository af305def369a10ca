"""Figures as SVG, drawn by matplotlib: lines with error bars, dots, and grids of images.

Each function returns an `svg` element. The slug, unique on the page, is the prefix of its ids; the title is for screen
readers.

Colours become CSS variables (figure.css), so that a figure follows the reader's light or dark mode. Markers and dashes
distinguish the lines without colour.
"""

from __future__ import annotations

import base64
import io
import re
import textwrap
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from math import isclose
from typing import Any

from PIL import Image

from .conditions import Spread
from .document import plain

_COLOURS = ("#1f4e9c", "#c4501b", "#2f7d4f", "#8a3f9e", "#8a6d00", "#0f7f8c", "#b0305c", "#555555")
_PAPER, _INK, _QUIET, _RULE = "#fffefb", "#1a1a1a", "#5c5c5c", "#d9d6cd"
_NAMES = {_PAPER: "paper", _INK: "ink", _QUIET: "quiet", _RULE: "rule"}
_NAMES |= {colour: f"s{number}" for number, colour in enumerate(_COLOURS)}
_VARIABLES = {colour: f"var(--{name})" for colour, name in _NAMES.items()}
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1.5)), (0, (9, 3)), (0, (1, 3)), "-.")
_MARKERS = ("o", "s", "^", "D", "x", "o", "s", "^")
_HOLLOW = 5  # markers from here on are hollow
STYLES = 8  # lines that can be told apart by colour, marker and dashes
_WIDTH = 480  # of a figure, in pixels
_BESIDE = 0.008  # between error bars of the same position, as a share of the axis
_FONT = "system-ui, Segoe UI, Helvetica, Arial, sans-serif"
_STYLE: dict[Any, Any] = {
    "font.size": 13,
    "font.family": "DejaVu Sans",
    "text.color": _INK,
    "text.parse_math": False,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": _RULE,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "figure.facecolor": "none",
    "image.composite_image": False,
    "axes.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "conadv",
}


@dataclass(frozen=True)
class Line:
    """A series of points, with the lengths of their error bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float | None] = ()


def line_chart(
    slug: str, title: str, lines: Sequence[Line], x_label: str, y_label: str, ticks: Mapping[float, str] | None = None
) -> str:
    """Draw at most 8 lines over a common axis, each with its own marker and dashes.

    `ticks` are labels by position on the horizontal axis; if they span a factor of 4 or more, it is logarithmic. Error
    bars at the same position are drawn side by side.
    """
    logarithmic = bool(ticks and min(ticks) > 0 and max(ticks) >= 4 * min(ticks))
    if ticks and any(any(line.deviation) for line in lines):
        lines = _side_by_side(lines, min(ticks), max(ticks), logarithmic)
    with _figure(300 + 19 * len(lines)) as figure:
        axes = figure.subplots()
        for number, line in enumerate(lines):
            _draw_line(axes, number, line)
        if ticks:
            if logarithmic:
                axes.set_xscale("log")
            axes.set_xticks(list(ticks), [_cut(label, 12) for label in ticks.values()])
            axes.set_xticks([], minor=True)
        axes.set(xlabel=_cut(x_label, 50), ylabel=_cut(y_label, 30))
        figure.legend(loc="outside lower left")
        return _svg(figure, slug, title)


def frontier_chart(slug: str, title: str, points: Sequence[tuple[str, float, Spread, bool]], x_label: str) -> str:
    """Draw test accuracy against cost, with a line through the best.

    Each point has a name, a cost, an accuracy, drawn with its 95 % interval, and whether it is dominated.
    """
    with _figure(320) as figure:
        axes = figure.subplots()
        best = sorted((x, of.mean) for _, x, of, dominated in points if not dominated)
        axes.plot([x for x, _ in best], [y for _, y in best], color=_COLOURS[0], linewidth=1.8)
        for _, x, of, dominated in points:
            colour, face = (_QUIET, _PAPER) if dominated else (_COLOURS[0], _COLOURS[0])
            axes.errorbar(x, of.mean, of.half, color=colour, marker="o", markersize=6, markerfacecolor=face)
        low, high = axes.get_ylim()
        for names, place in _joined([(_cut(name, 12), (x, of.mean)) for name, x, of, _ in points], (high - low) / 18):
            axes.annotate(", ".join(names), place, (6, 5), textcoords="offset points")
        axes.set(xlabel=_cut(x_label, 50), ylabel="test accuracy, %")
        return _svg(figure, slug, title)


def _joined(
    points: Sequence[tuple[str, tuple[float, float]]], height: float
) -> list[tuple[list[str], tuple[float, float]]]:
    """Merge the labels of points with equal x whose labels, of this height, would overlap; placed at the highest."""
    labels: list[tuple[list[str], tuple[float, float]]] = []
    for name, (x, y) in sorted(points, key=lambda point: (point[1][0], -point[1][1])):
        if labels and isclose(labels[-1][1][0], x) and labels[-1][1][1] - y < height:
            labels[-1][0].append(name)
        else:
            labels.append(([name], (x, y)))
    return labels


def dot_plot(slug: str, title: str, rows: Sequence[tuple[str, Sequence[float], Spread]], label: str) -> str:
    """Draw one row per name: each number as a hollow dot, their mean and one standard deviation."""
    with _figure(64 + 34 * len(rows)) as figure:
        axes = figure.subplots()
        for place, (_, numbers, of) in enumerate(rows):
            axes.errorbar(of.mean, place, xerr=of.deviation, fmt="o", color=_COLOURS[0], linewidth=2, zorder=3)
            below = [place + 0.27] * len(numbers)
            axes.plot(numbers, below, "o", markersize=5, markerfacecolor=_PAPER, markeredgecolor=_QUIET)
        axes.set_yticks(range(len(rows)), [_wrapped(name, 24) for name, _, _ in rows], color=_INK)
        axes.set_ylim(len(rows) - 0.4, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(_cut(label, 50))
        return _svg(figure, slug, title)


def image_grid(slug: str, title: str, rows: Sequence[tuple[str, Sequence[str], Sequence[str]]]) -> str:
    """Draw rows of images: for each its name, the images as base64 PNG, and the texts below them.

    ValueError if an image cannot be decoded.
    """
    left, side, step = 78, 60, 66
    with _figure(24 + sum(78 if texts else 64 for _, _, texts in rows), layout=None) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.text(0, 13, _cut(title, 60), weight="bold")
        top = 24
        for name, images, texts in rows:
            axes.text(0, top + side / 2, _cut(name, 11), va="center")
            for number, data in enumerate(images):
                x = left + step * number
                axes.imshow(_pixels(data), extent=(x, x + side, top + side, top), interpolation="none")
            for number, text in enumerate(texts):
                axes.text(left + step * number + side / 2, top + side + 12, _cut(text, 10), ha="center", size=11)
            top += 78 if texts else 64
        axes.set(xlim=(0, _WIDTH), ylim=(top, 0), aspect="auto")
        axes.set_axis_off()
        return _svg(figure, slug, title)


def standalone(svg: str) -> str:
    """An `svg` element as a file of its own, with its style and background."""
    opening, rest = svg.split(">", 1)
    opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    style = (files(__package__) / "templates" / "figure.css").read_text(encoding="utf-8")
    return f"{opening}><style>{style}</style>{paper}{rest}\n"


def _side_by_side(lines: Sequence[Line], low: float, high: float, logarithmic: bool) -> list[Line]:
    """Move each line a little along a horizontal axis from `low` to `high`."""

    def moved(line: Line, share: float) -> Line:
        far = (high / low) ** share if logarithmic else share * (high - low)
        return replace(line, x=[x * far if logarithmic else x + far for x in line.x])

    return [moved(line, _BESIDE * (number - (len(lines) - 1) / 2)) for number, line in enumerate(lines)]


def _draw_line(axes: Any, number: int, line: Line) -> None:
    colour, marker = _COLOURS[number % STYLES], _MARKERS[number % STYLES]
    every = len(line.x) // 6 if len(line.x) > 12 else 1  # long lines have few markers, at different places
    deviations = [deviation or 0.0 for deviation in line.deviation]
    axes.errorbar(
        line.x,
        line.y,
        yerr=deviations if any(deviations) else None,
        color=colour,
        linestyle=_DASHES[number % STYLES],
        linewidth=1.8,
        elinewidth=1.4,
        marker=marker,
        markersize=6,
        markerfacecolor=_PAPER if number % STYLES >= _HOLLOW else colour,
        markevery=(number * every // 8, every),
        label=re.sub("^(?=_|$)", " ", _wrapped(line.name, 60)),  # matplotlib hides labels that start with _
    )


@contextmanager
def _figure(height: int, layout: Any = "constrained") -> Iterator[Any]:
    """A figure of this size in pixels, in our style."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the figures of a report need matplotlib: pip install 'conadv[plots]'") from None
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has other fonts
        yield Figure(figsize=(_WIDTH / 72, height / 72), layout=layout)


def _svg(figure: Any, slug: str, title: str) -> str:
    """The figure as an `svg` element without a namespace, with unique ids and CSS variables for colours."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    for element in root.iter():
        element.tag, element.tail = element.tag.partition("}")[2], "\n"
        element.attrib = {
            name.partition("}")[2] or name: _attribute(name, value, slug) for name, value in element.attrib.items()
        }
    name = ElementTree.Element("title", id=f"{slug}-name")
    name.text = plain(title)
    root.insert(0, name)
    size = dict(zip(("width", "height"), root.attrib["viewBox"].split()[2:], strict=True))
    root.attrib = {"class": "drawing", "role": "img", "aria-labelledby": f"{slug}-name", **size} | {
        "viewBox": root.attrib["viewBox"]
    }
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, slug: str) -> str:
    if name == "id":
        return f"{slug}-{value}"
    if name == "style":
        value = re.sub(r"'DejaVu Sans'[^;]*", _FONT, value)
        value = re.sub(r"#[0-9a-f]{6}", lambda found: _VARIABLES.get(found[0], found[0]), value)
    return re.sub(r"^#|(?<=url\()#", f"#{slug}-", value)


def _pixels(data: str) -> Any:
    try:
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["PNG"]) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"not a PNG image ({error})") from None


def _wrapped(name: str, width: int) -> str:
    """In at most two lines."""
    return "\n".join(textwrap.wrap(_cut(name, 2 * width - 8), width, max_lines=2, placeholder="…"))


def _cut(text: str, most: int) -> str:
    text = plain(text)
    return text if len(text) <= most else text[: most - 1] + "…"
