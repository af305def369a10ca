"""Figures: numbers where they belong, nothing told by colour alone, the same file every time, and hostile names."""

from __future__ import annotations

import base64
import builtins
import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conadv import cli
from conadv.study.report.conditions import Spread
from conadv.study.report.figures import Line, dot_plot, frontier_chart, image_grid, line_chart, standalone
from study.studies import make_study

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<script>alert(1)</script>",
    "$\\frac{$",
    "a$b$c",
    "]]> --> &amp;",
    "\x00\x1b[31m",
    "\n\n",
    "漢字 🙂",
    "x" * 500,
    "_hidden",
    "",
]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(standalone(svg))


def chart(count: int = 1, **words: Any) -> ElementTree.Element:
    lines = [Line(f"arm {number}", [1.0, 2.0, 4.0], [number, number + 1, number + 3]) for number in range(count)]
    return parsed(line_chart("test", "A <title>", lines, "across", "up & down", **words))


def paths(root: ElementTree.Element, colour: str) -> list[list[tuple[float, float]]]:
    """The points of the open paths that are drawn in a colour."""
    found = [path for path in root.iter(f"{SVG}path") if f"stroke: var(--{colour})" in path.get("style", "")]
    places = [
        re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d", ""))
        for path in found
        if "fill: none" in path.get("style", "")
    ]
    return [[(float(x), float(y)) for x, y in several] for several in places]


def texts(root: ElementTree.Element) -> dict[str, tuple[float, float]]:
    return {text.text or "": (float(text.get("x", 0)), float(text.get("y", 0))) for text in root.iter(f"{SVG}text")}


def test_points_of_a_frontier_that_lie_on_each_other_share_a_label() -> None:
    means = {"1": (1.0, 40.0), "2": (8 / 3, 48.4), "3": (400 / 150, 48.3), "4": (8 / 3, 45.0), "5": (2.0, 48.4)}
    points = [(name, x, Spread(mean, None, 1), name != "2") for name, (x, mean) in means.items()]
    found = texts(parsed(frontier_chart("test", "A title", points, "work")))
    assert {"1", "2, 3", "4", "5"} <= found.keys()
    assert not {"2", "3"} & found.keys()
    assert found["2, 3"][1] == found["5"][1]


def test_points_lie_where_the_axis_says() -> None:
    root = chart(1, ticks={1.0: "one", 2.0: "two", 4.0: "four"})
    line = next(path for path in paths(root, "s0") if len(path) == 3)
    labels = texts(root)
    # Even by ratio, since 4 is four times 1.
    assert [x for x, _ in line] == pytest.approx([labels[name][0] for name in ("one", "two", "four")], abs=0.01)
    assert line[1][0] == pytest.approx((line[0][0] + line[2][0]) / 2, abs=0.01)
    # y rises by 1 and then by 2.
    assert (line[0][1] - line[2][1]) == pytest.approx(3 * (line[0][1] - line[1][1]), rel=1e-4)


def test_an_axis_that_starts_at_zero_is_linear() -> None:
    line = Line("a", [0.0, 4.0, 8.0], [1.0, 2.0, 3.0])
    root = parsed(line_chart("t", "t", [line], "x", "y", {0.0: "0", 4.0: "4", 8.0: "8"}))
    (drawn,) = (path for path in paths(root, "s0") if len(path) == 3)
    assert drawn[1][0] == pytest.approx((drawn[0][0] + drawn[2][0]) / 2, abs=0.01)


def test_bars_are_one_deviation_long() -> None:
    root = parsed(line_chart("t", "t", [Line("a", [0.0, 1.0], [1.0, 2.0], [0.5, None])], "x", "y"))
    found = paths(root, "s0")
    line = next(path for path in found if path[0][0] != path[-1][0] and len(path) == 2)
    bar = next(path for path in found if path[0][0] == path[-1][0] == line[0][0])
    assert abs(bar[0][1] - bar[1][1]) == pytest.approx(abs(line[0][1] - line[1][1]), rel=1e-3)  # 0.5 each way, and 1


@pytest.mark.parametrize("last", [3.0, 8.0])  # a linear axis, and a logarithmic one
def test_error_bars_of_one_place_are_side_by_side(last: float) -> None:
    ticks = {1.0: "1", 2.0: "2", last: "last"}
    lines = [Line(f"arm {number}", list(ticks), [1.0, 2.0, 3.0], [0.5, 0.5, 0.5]) for number in range(3)]
    root = parsed(line_chart("test", "title", lines, "across", "up", ticks))
    bars = [[line for line in paths(root, f"s{number}") if len({x for x, _ in line}) == 1] for number in range(3)]
    places = [sorted({x for line in of for x, _ in line})[-3:] for of in bars]  # the legend has one more
    labels = texts(root)
    for tick, (first, middle, third) in zip(ticks.values(), zip(*places, strict=True), strict=True):
        assert first < middle < third < first + 20
        assert middle == pytest.approx(labels[tick][0], abs=0.5)


def test_lines_differ_in_dash_and_marker_and_are_named() -> None:
    root = chart(8)
    lines = [
        path
        for path in root.iter(f"{SVG}path")
        if re.search(r"stroke: var\(--s\d\); stroke-width: 1.8", path.get("style", ""))
    ]
    dashes = {re.search(r"stroke-dasharray: ([^;]*)|$", path.get("style", ""))[1] for path in lines}
    assert len(dashes) == 8
    assert {f"arm {number}" for number in range(8)} <= set(texts(root))
    shapes = {(use.get("href"), use.get("style")) for use in root.iter(f"{SVG}use") if "--s" in use.get("style", "")}
    assert len({href for href, _ in shapes}) == 8


def test_dots_lie_where_their_numbers_are() -> None:
    rows = [("one", [30.0, 34.0], Spread(32.0, 2.0, 2))]
    root = parsed(dot_plot("dots", "Dots", rows, "accuracy"))
    dots = [float(use.get("x", 0)) for use in root.iter(f"{SVG}use") if "var(--paper)" in use.get("style", "")]
    (mean,) = (float(use.get("x", 0)) for use in root.iter(f"{SVG}use") if "var(--s0)" in use.get("style", ""))
    assert mean == pytest.approx(sum(dots) / 2, abs=0.01)
    (bar,) = (path for path in paths(root, "s0") if len(path) == 2)
    assert sorted(x for x, _ in bar) == pytest.approx(sorted(dots), abs=0.01)


def png(shade: int) -> str:
    with io.BytesIO() as file:
        Image.new("L", (4, 4), shade).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()


def test_images_are_shown_pixel_by_pixel_with_their_texts() -> None:
    root = parsed(image_grid("g", "a title", [("image", [png(10), png(200)], ["cat", "a very long name"])]))
    shown = [image.get("href", "").split(",")[1] for image in root.iter(f"{SVG}image")]
    pixels = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in shown]
    assert [(image.size, image.getpixel((0, 0))) for image in pixels] == [((4, 4), (10,) * 3), ((4, 4), (200,) * 3)]
    assert {"a title", "image", "cat", "a very lo…"} <= set(texts(root))


@pytest.mark.parametrize("data", ["", "!", "AAAA", png(3)[:40], png(3)[:-30] + "AAAA"])
def test_what_is_not_an_image_is_a_value_error(data: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        image_grid("g", "t", [("image", [data], [])])


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_shown_as_text_and_cut(name: str) -> None:
    line = Line(name, [0.0, 1.0], [1.0, 2.0])
    for svg in (
        line_chart("a", name, [line], name, name, {0.0: name, 1.0: "b"}),
        dot_plot("a", name, [(name, [1.0], Spread(1.0, None, 1))], "x"),
        image_grid("a", name, [(name, [png(1)], [name])]),
    ):
        root = parsed(svg)
        assert not list(root.iter(f"{SVG}script"))
        assert "script" not in {element.tag for element in root.iter()}


def test_the_same_numbers_give_the_same_file() -> None:
    line = Line("a", [0.0, 1.0, 2.0], [1.0, 2.0, 1.5], [0.1, 0.2, 0.3])
    first, second = (line_chart("a", "t", [line], "x", "y") for _ in range(2))
    assert first == second
    assert not re.search(r"20\d\d-\d\d-\d\d|metadata", first)


def test_every_colour_is_a_variable_that_light_and_dark_define() -> None:
    svg = line_chart("a", "t", [Line(str(number), [0.0, 1.0], [1.0, number]) for number in range(8)], "x", "y")
    assert not re.search(r"#[0-9a-f]{6}", svg)
    used = set(re.findall(r"var\((--\w+)\)", svg))
    sheet = re.search("<style>(.*?)</style>", standalone(svg), re.DOTALL)
    assert sheet is not None
    light, dark = sheet[1].split("@media")
    assert used <= set(re.findall(r"(--\w+):", light)) and used <= set(re.findall(r"(--\w+):", dark))


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(name: str, *words: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *words, **options)

    folder = make_study(tmp_path, "[grid]\nseed = [0]\n", steps=3)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert cli.main(["report", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "pip install 'conadv[plots]'" in message and message.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_name_that_starts_with_an_underscore_is_in_the_legend() -> None:
    root = parsed(line_chart("a", "t", [Line("_hidden", [0.0, 1.0], [1.0, 2.0])], "x", "y"))
    assert "_hidden" in {text.strip() for text in texts(root)}
