"""Drawings as SVG: lines with names at their ends, and dots with their spread. Readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .axes import Scale, apart, at_values, linear
from .spread import Spread

_WIDTH = 480.0
_LETTER = 7.0  # about the width of a letter
_LINE = 15.0  # the height of a line of text

_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2 1 2")
_MARKERS = ("circle", "square", "triangle", "diamond", "cross", "hollow circle", "hollow square", "hollow triangle")


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    deviation: float | None = None
    text: str = ""
    """What a pointer that rests on it tells."""


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Axis:
    name: str
    at_values: bool = False
    """Ticks at the values themselves instead of at round numbers."""
    tick_names: Sequence[str] = ()
    """Of ticks at values, in their order; empty: the numbers."""


def line_chart(slug: str, title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines that their names stand beside, with bars of one standard deviation where there is one."""
    names = [_wrapped(one.name) for one in series]
    right = _WIDTH - 14 - _LETTER * max(len(line) for lines in names for line in lines)
    top, bottom = 26.0, 280.0
    points = [point for one in series for point in one.points]
    across = [point.x for point in points]
    scale_x = at_values(across, 58, right) if x.at_values else linear(across, 52, right)
    ends = [point.y + sign * (point.deviation or 0) for point in points for sign in (-1, 1)]
    scale_y = linear(ends, bottom, top)
    lines = [_line(number, one, scale_x, scale_y) for number, one in enumerate(series)]
    places = [scale_y(one.points[-1].y) for one in series]
    tags = [
        _tag(number, lines_of, (scale_x(one.points[-1].x), place), (right, moved))
        for number, (one, lines_of, place, moved) in enumerate(
            zip(series, names, places, _tag_places(places, names, top, bottom), strict=True)
        )
    ]
    body = [_grid(scale_y, 46, right), *_bottom(scale_x, x, bottom), _title_of(y.name, 0, 12), *lines, *tags]
    return drawn(slug, title, bottom + 42, body)


def dot_plot(slug: str, title: str, rows: Sequence[tuple[str, Sequence[Point], Spread]], axis: Axis) -> str:
    """A row for each name: its figures (x of the points) as small dots, their mean and one standard deviation."""
    names = [_wrapped(name, 24) for name, _, _ in rows]
    left = 12 + _LETTER * max(len(line) for lines in names for line in lines)
    figures = [point.x for _, points, _ in rows for point in points]
    ends = [of.mean + sign * (of.deviation or 0) for _, _, of in rows for sign in (-1, 1)]
    scale = linear([*figures, *ends], left + 8, _WIDTH - 14, most_ticks=5)
    bottom = 12.0 + 34 * len(rows)
    body = _bottom(scale, axis, bottom, top=6)
    for number, ((_, points, of), lines) in enumerate(zip(rows, names, strict=True)):
        place = 24.0 + 34 * number
        first = place + 4.5 - _LINE / 2 * (len(lines) - 1)
        body += [words(left, first + _LINE * nth, line, "end") for nth, line in enumerate(lines)]
        body.append(_dots(points, of, scale, place))
    return drawn(slug, title, bottom + 42, body)


def marker(number: int, x: float, y: float, text: str = "") -> str:
    """The sign of a series: its form tells it from the others even without colour."""
    kind = _MARKERS[number % len(_MARKERS)]
    colour = f"var(--s{number % 8})"
    hollow = kind.startswith("hollow")
    paint = f'class="hollow" stroke="{colour}" stroke-width="1.6"' if hollow else f'fill="{colour}"'
    inner = f"<title>{escape(text)}</title>" if text else ""
    match kind.removeprefix("hollow "):
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.8" {paint}>{inner}</circle>'
        case "square":
            return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {paint}>{inner}</rect>'
        case "triangle":
            path = f"M{x:.1f} {y - 4.6:.1f}l4.4 7.8h-8.8z"
        case "diamond":
            path = f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"
        case _:
            path = f"M{x - 3.6:.1f} {y - 3.6:.1f}l7.2 7.2m0 -7.2l-7.2 7.2"
            paint = f'fill="none" stroke="{colour}" stroke-width="2"'
    return f'<path d="{path}" {paint}>{inner}</path>'


def _line(number: int, series: Series, x: Scale, y: Scale) -> str:
    places = [(x(point.x), y(point.y)) for point in series.points]
    path = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    dash = _DASHES[number % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    colour = f"var(--s{number % 8})"
    drawn = [f'<path class="line" d="{path}" stroke="{colour}"{dashes}/>']
    # On long lines a marker now and then, not at the same places for all.
    every = max(1, len(places) // 6)
    for nth, (point, (across, up)) in enumerate(zip(series.points, places, strict=True)):
        if point.deviation:
            low, high = y(point.y - point.deviation), y(point.y + point.deviation)
            drawn.append(f'<path class="bar" d="M{across:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>')
        if nth == len(places) - 1 or nth % every == (number * every // 8 if every > 1 else 0):
            drawn.append(marker(number, across, up, point.text))
    return "<g>" + "".join(drawn) + "</g>"


def _tag_places(places: Sequence[float], names: Sequence[Sequence[str]], top: float, bottom: float) -> list[float]:
    tallest = _LINE * max(len(lines) for lines in names)
    return apart(places, tallest, top + 4, bottom - 2)


def _tag(number: int, lines: Sequence[str], end: tuple[float, float], place: tuple[float, float]) -> str:
    """The name of a line beside its end."""
    (x, y), (right, moved) = end, place
    leader = (
        f'<path class="leader" d="M{x + 5:.1f} {y:.1f}L{right + 8:.1f} {moved:.1f}" stroke="var(--s{number % 8})"/>'
    )
    first = moved + 4.5 - _LINE / 2 * (len(lines) - 1)
    texts = [words(right + 11, first + _LINE * nth, line) for nth, line in enumerate(lines)]
    return (leader if abs(moved - y) > 3 or right - x > 4 else "") + "".join(texts)


def _dots(points: Sequence[Point], of: Spread, scale: Scale, y: float) -> str:
    drawn = [
        f'<circle class="hollow" cx="{scale(point.x):.1f}" cy="{y + 9:.1f}" r="3" stroke="var(--quiet)">'
        f"<title>{escape(point.text)}</title></circle>"
        for point in points
    ]
    if of.deviation:
        low, high = scale(of.mean - of.deviation), scale(of.mean + of.deviation)
        drawn.append(f'<path class="bar" d="M{low:.1f} {y:.1f}H{high:.1f}" stroke="var(--s0)" stroke-width="2"/>')
    drawn.append(marker(0, scale(of.mean), y, of.text(2)))
    return "<g>" + "".join(drawn) + "</g>"


def _grid(scale: Scale, left: float, right: float) -> str:
    rules = [f'<path class="grid" d="M{left:g} {scale(tick):.1f}H{right:.1f}"/>' for tick in scale.ticks]
    names = [words(left - 5, scale(tick) + 4.5, tick_name(tick, scale), "end", "quiet") for tick in scale.ticks]
    return "".join([*rules, *names])


def _bottom(scale: Scale, axis: Axis, y: float, top: float | None = None) -> list[str]:
    """The ticks below a drawing, the name of the axis, and rules up to `top`."""
    names = list(axis.tick_names) or [tick_name(tick, scale) for tick in scale.ticks]
    drawn = [f'<path class="axis" d="M{scale.start:.1f} {y:g}H{scale.end:.1f}"/>']
    free = float("-inf")  # where the last name ended: names that would overlap are left out
    for tick, name in zip(scale.ticks, names, strict=True):
        x, half = scale(tick), _LETTER * len(name) / 2
        drawn.append(f'<path class="axis" d="M{x:.1f} {y:g}v4"/>')
        if top is not None:
            drawn.append(f'<path class="grid" d="M{x:.1f} {y:g}V{top:g}"/>')
        if x - half > free + 5:
            drawn.append(words(x, y + 18, name, "middle", "quiet"))
            free = x + half
    middle = (scale.start + scale.end) / 2
    return [*drawn, words(middle, y + 37, axis.name, "middle")]


def tick_name(tick: float, scale: Scale) -> str:
    """With as many digits as the distance of the ticks asks for, but none that are 0 for all."""
    for digits in range(6):
        if all(abs(round(other, digits) - other) < 1e-9 * max(1.0, abs(other)) for other in scale.ticks):
            return f"{tick + 0.0:,.{digits}f}".replace("-", "−")
    return f"{tick:g}"


def _title_of(text: str, x: float, y: float) -> str:
    return words(x, y, text, "start")


def words(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{place}{named}>{escape(text)}</text>'


def _wrapped(name: str, most: int = 20) -> list[str]:
    """In at most two lines, broken where a space is."""
    if len(name) <= most:
        return [name]
    spaces = [place for place, letter in enumerate(name) if letter == " "]
    if not spaces:
        return [name[: most - 1] + "…"]
    middle = min(spaces, key=lambda place: abs(place - len(name) / 2))
    return [part if len(part) <= most + 4 else part[: most + 3] + "…" for part in (name[:middle], name[middle + 1 :])]


def drawn(slug: str, title: str, height: float, body: Sequence[str]) -> str:
    """The element of a whole drawing, which its title names to who does not see it."""
    name = f'<title id="{slug}-name">{escape(title)}</title>'
    size = f'width="{_WIDTH:g}" height="{height:g}" viewBox="0 0 {_WIDTH:g} {height:g}"'
    opening = f'<svg class="drawing" {size} role="img" aria-labelledby="{slug}-name">'
    return f"{opening}{name}{''.join(body)}</svg>"
