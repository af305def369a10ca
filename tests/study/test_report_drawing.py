"""Scales and drawings: figures where they belong, names apart, nothing told by colour alone."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.study.report.axes import apart, at_values, linear, round_step
from conadv.study.report.drawing import Axis, Point, Series, dot_plot, line_chart, tick_name
from conadv.study.report.spread import Spread
from conadv.study.report.style import standalone

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(NUMBERS, min_size=1, max_size=20))
def test_a_scale_holds_all_values_between_round_ticks(values: list[float]) -> None:
    scale = linear(values, 0, 100)
    slack = 1e-6 * (scale.high - scale.low)
    assert scale.low <= min(values) + slack and scale.high >= max(values) - slack
    assert scale(scale.low) == 0 and scale(scale.high) == pytest.approx(100)
    assert 2 <= len(scale.ticks) <= 8
    steps = [later - earlier for earlier, later in zip(scale.ticks, scale.ticks[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-6)


@pytest.mark.parametrize(("least", "step"), [(0.9, 1), (1, 1), (1.1, 2), (2.4, 2.5), (3, 5), (7, 10), (0.03, 0.05)])
def test_steps_are_round(least: float, step: float) -> None:
    assert round_step(least) == pytest.approx(step)


def test_values_that_spread_far_are_set_even_by_ratio() -> None:
    rates = at_values([20, 5, 10], 0, 100)
    assert [rates(rate) for rate in rates.ticks] == pytest.approx([0, 50, 100])
    radii = at_values([0, 4, 8], 0, 100)  # no ratio to 0
    assert [radii(radius) for radius in radii.ticks] == pytest.approx([0, 50, 100])
    assert at_values([3.0], 0, 100)(3.0) == 50


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_names_are_kept_apart_in_their_order(places: list[float]) -> None:
    moved = apart(places, 12, 0, 100)
    order = sorted(range(len(places)), key=lambda number: places[number])
    gaps = [moved[later] - moved[earlier] for earlier, later in itertools.pairwise(order)]
    assert all(gap >= 12 - 1e-9 for gap in gaps)
    assert min(moved) >= 0 and max(moved) <= 100 + 1e-9


def test_names_that_are_apart_stay_where_they_are() -> None:
    assert apart([90.0, 10.0, 50.0], 12, 0, 100) == [90.0, 10.0, 50.0]


@pytest.mark.parametrize(
    ("values", "names"),
    [([0, 10], ["0", "2", "4", "6", "8", "10"]), ([0, 1], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"])],
)
def test_ticks_have_the_digits_they_need(values: list[float], names: list[str]) -> None:
    scale = linear(values, 0, 1)
    assert [tick_name(tick, scale) for tick in scale.ticks] == names


def chart(count: int) -> ElementTree.Element:
    series = [
        Series(f"arm {number}", [Point(x, number + x, 0.5, f"at {x}") for x in (1.0, 2.0, 4.0)])
        for number in range(count)
    ]
    text = line_chart("test", "A <title>", series, Axis("across", at_values=True), Axis("up & down"))
    return ElementTree.fromstring(standalone(text))


def test_lines_differ_in_dash_and_marker_and_have_their_names_beside_them() -> None:
    root = chart(8)
    lines = [path for path in root.iter(f"{SVG}path") if path.get("class") == "line"]
    assert len({line.get("stroke-dasharray") for line in lines}) == 8
    groups = list(root.iter(f"{SVG}g"))
    shapes = {_shape(group[-1]) for group in groups}
    assert len(shapes) == 8
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {f"arm {number}" for number in range(8)} <= set(texts)
    assert root.find(f"{SVG}title").text == "A <title>"


def _shape(element: ElementTree.Element) -> tuple[str, str | None, str]:
    """What a marker looks like in black and white: its form without its place, and whether it is filled."""
    letters = re.sub(r"^M[-\d. ]+", "", element.get("d", ""))
    return element.tag, element.get("class"), letters


def test_bars_are_one_deviation_long() -> None:
    root = chart(1)
    line = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "line")
    places = [tuple(map(float, pair.split())) for pair in line.get("d").removeprefix("M").split("L")]
    a_unit = (places[0][1] - places[1][1]) / 1.0  # from y 1 to y 2
    bar = next(path for path in root.iter(f"{SVG}path") if path.get("class") == "bar")
    x, low, high = map(float, re.fullmatch(r"M([\d.]+) ([\d.]+)V([\d.]+)", bar.get("d")).groups())
    assert x == places[0][0]
    assert (low - high) / a_unit == pytest.approx(1.0, abs=0.01)  # 0.5 each way


def test_dots_lie_where_their_figures_are() -> None:
    rows = [("one", [Point(30.0, 0, text="seed 0"), Point(34.0, 0, text="seed 1")], Spread(32.0, 2.8, 2))]
    text = dot_plot("dots", "Dots", rows, Axis("accuracy"))
    root = ElementTree.fromstring(standalone(text))
    dots = list(root.iter(f"{SVG}circle"))
    first, second, mean = (float(dot.get("cx")) for dot in dots)
    assert mean == pytest.approx((first + second) / 2, abs=0.11)
    assert [dot.find(f"{SVG}title").text for dot in dots] == ["seed 0", "seed 1", "32.00 ± 2.80"]


@pytest.mark.parametrize("name", ["x" * 80, "a name of several words that go on and on for a while", ""])
def test_long_names_are_cut_to_two_lines(name: str) -> None:
    text = line_chart("test", "t", [Series(name, [Point(0, 0), Point(1, 1)])], Axis("x"), Axis("y"))
    ElementTree.fromstring(standalone(text))
    written = [found for found in re.findall(r"<text[^>]*>([^<]*)</text>", text) if found and found[0] in "xag…"]
    assert all(len(found) <= 24 for found in written)
