"""Predicted against measured ratios of layouts."""

import math

import pytest

from conadv.study.plan.measured import compare_layouts, render_comparison
from conadv.study.plan.request import PlanRequest
from study import plans


def request(link: str = plans.FREE) -> PlanRequest:
    sizes = {"batch_size": 128, "chunk_size": 128, "data_size": 200}
    return plans.request(**plans.machine(2, 1, link, link), **sizes, overlap=0.0, algorithm="ring")


def document(*entries: dict[str, object]) -> dict[str, object]:
    return {"machine": {}, "results": [{"ratio": 1.0, "low": 0.9, "high": 1.1, "n": 5} | entry for entry in entries]}


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("recycled/vanilla-2", 1.0),
        ("recycled/vanilla-1", 1.0),
        ("recycled/vanilla", 1.0),
        ("disadv/vanilla-2", 5 / 3),
        ("disadv-4/recycled-2", 5 / 3),
        ("conadv/disadv", 3 / 5),
        ("vanilla-2/vanilla-1", 1.0),
    ],
)
def test_ratios_of_paths_where_the_network_is_free(name, ratio) -> None:
    (found,) = compare_layouts(request(), document({"name": name}))
    assert found.predicted == pytest.approx(ratio)


def test_the_network_counts_on_each_side() -> None:
    (found,) = compare_layouts(request(plans.link(16.0, 1e18)), document({"name": "vanilla-2/vanilla-1"}))
    assert found.predicted == pytest.approx((384 + 2 * 16) / 384)


def test_deviation_and_spread() -> None:
    entries = (
        {"name": "disadv/vanilla-2", "ratio": 1.6, "low": 1.5, "high": 1.7},
        {"name": "recycled/vanilla-2", "ratio": 1.25, "low": 1.2, "high": 1.3},
    )
    inside, outside = compare_layouts(request(), document(*entries))
    assert inside.within_spread and not outside.within_spread
    assert outside.deviation == pytest.approx(-20.0)
    lines = render_comparison((inside, outside)).splitlines()
    assert "disadv/vanilla-2" in lines[2] and lines[2].endswith("yes")
    assert "-20.0 %" in lines[3] and lines[3].endswith("no")


def test_other_results_are_passed_over() -> None:
    (found,) = compare_layouts(request(), document({"name": "forward"}, {"name": "recycled/vanilla-2"}, {"name": None}))
    assert found.name == "recycled/vanilla-2"


def test_a_document_without_ratios() -> None:
    with pytest.raises(ValueError, match="bench layout --json"):
        compare_layouts(request(), document({"name": "forward"}))


@pytest.mark.parametrize(
    "entry",
    [
        {"ratio": "x"},
        {"ratio": 0.0},
        {"ratio": math.nan},
        {"low": None},
        {"low": math.nan},
        {"n": math.inf},
        {"n": "many"},
        {"high": []},
    ],
)
def test_a_ratio_without_its_numbers_is_named(entry) -> None:
    with pytest.raises(ValueError, match='"recycled/vanilla-2" needs numbers'):
        compare_layouts(request(), document({"name": "recycled/vanilla-2"} | entry))


@pytest.mark.parametrize("name", ["recycled-3/vanilla", "vanilla/conadv-2", "vanilla-0/vanilla"])
def test_ranks_that_make_no_lanes(name) -> None:
    with pytest.raises(ValueError, match="needs a multiple of"):
        compare_layouts(request(), document({"name": name}))
