"""A plan for people: the text and the picture."""

import builtins
from pathlib import Path

import pytest

from conadv.core.catalog import METHODS
from conadv.study.plan.planner import Plan, plan
from conadv.study.plan.plot import plot
from conadv.study.plan.request import PlanRequest
from conadv.study.plan.table import columns, render
from study.plans import FREE, link, machine, model, passes

LINK = link(1e-5, 1e9)
SMALL = passes(1e-3, 1e-3, 1e-3) | model(10**6, 3072)


@pytest.fixture(scope="module")
def answer() -> Plan:
    return plan(PlanRequest(**SMALL, **machine(2, 1, LINK, LINK), batch_size=256, data_size=50_000))


def test_columns_line_up() -> None:
    table = columns([("name", "seconds"), ("a", "1.5"), ("longer", "10")])
    assert table.splitlines() == ["name    seconds", "──────  ───────", "a           1.5", "longer       10"]


def test_the_text_names_every_row_and_what_was_left_out(answer) -> None:
    text = render(answer)
    lines = [line.split() for line in text.splitlines()]
    for row in answer.rows:
        assert [row.method, *row.layout.split(), str(row.lanes), str(row.ranks)] in [
            line[: len(row.layout.split()) + 3] for line in lines
        ]
    assert text.count("← best") == len(METHODS)
    assert 'conadv "clean | adv | attack": needs 3 devices, and the machine has 2' in text
    assert f"{answer.request.steps(256)} steps" in text
    assert "stops paying at" in text


def test_a_plan_of_one_rank_has_no_handoff_to_tell_of() -> None:
    request = PlanRequest(**SMALL, **machine(1, 1, FREE, LINK), batch_size=64, data_size=100, jitter=0.0)
    text = render(plan(request))
    assert "hand-off of a lane" not in text
    assert "Left out" in text


@pytest.mark.parametrize(
    ("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF"), ("p.PNG", b"\x89PNG")]
)
def test_the_picture_is_of_the_kind_its_name_says_and_alone(answer, tmp_path, name, start) -> None:
    path = tmp_path / name
    path.write_text("old")
    plot(answer, path)
    assert path.read_bytes().startswith(start)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "words"), [("p.txt", "png"), ("p", "png"), ("none/p.png", "no folder")])
def test_pictures_that_cannot_be_drawn(answer, tmp_path, name, words) -> None:
    with pytest.raises(ValueError, match=words):
        plot(answer, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(answer, tmp_path, monkeypatch) -> None:
    original = builtins.__import__

    def without(name, *rest, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"conadv\[plots\]"):
        plot(answer, tmp_path / "p.png")


def test_the_page_shows_what_the_command_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    assert render(plan(PlanRequest(nodes=192))) in page.read_text(encoding="utf-8")
