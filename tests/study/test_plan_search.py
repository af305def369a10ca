"""The search over counts and shares: what it tries, what it prefers, and what it prints."""

from __future__ import annotations

import itertools
import json

import pytest

from conadv import cli
from conadv.core.catalog import METHODS
from conadv.study.plan.lane import fit_lane
from conadv.study.plan.request import PlanRequest
from conadv.study.plan.search import lanes_of, pareto, search
from conadv.study.plan.table import render_search

SMALL = {"batch_size": 64 * 24, "nodes": 2, "devices_per_node": 4, "data_size": 10_000, "search": True, "lane_ranks": 4}
FREE = {"inside": "free", "between": "free", "jitter": 0.0, "forward": 1e-3, "input_backward": 1e-3}
PLAIN = {"samples": 10, **SMALL, **FREE, "weight_backward": 1e-3, "pixel_backward": 0.0, "overhead": 0.0}


@pytest.mark.parametrize("method", METHODS)
def test_every_proportion_is_tried_once(method: str) -> None:
    lanes = list(lanes_of(method, 6))
    assert len(lanes) == len(set(lanes))
    proportions = set()
    for text in lanes:
        lane = fit_lane(text, METHODS[method].duties)
        assert lane is not None
        assert lane.world_size <= 6
        whole = sum(lane.counts.values())
        proportions.add(tuple((role, count / whole) for role, count in lane.counts.items()))
    assert len(proportions) == len(lanes)


def test_no_row_beats_one_of_the_frontier() -> None:
    found = search(PlanRequest(**PLAIN))
    kept = {(row.method, row.twin_share): [] for row in found.frontier}
    for row in found.frontier:
        kept[row.method, row.twin_share].append(row)
    for rows in kept.values():
        assert rows == pareto(rows)
        for one, other in itertools.pairwise(rows):
            assert one.ranks < other.ranks
            assert one.step_seconds > other.step_seconds
    for best in found.best:
        assert best.step_seconds == min(row.step_seconds for row in kept[best.method, best.twin_share])
        assert best.ranks <= 8


def test_with_a_deadline_it_takes_the_fewest_devices() -> None:
    fastest = search(PlanRequest(**PLAIN, methods=("recycled",), shares=(1.0,)))
    slow = 2 * fastest.best[0].hours
    (chosen,) = search(PlanRequest(**PLAIN, methods=("recycled",), shares=(1.0,), deadline=slow)).best
    assert chosen.hours <= slow
    assert chosen.ranks == min(row.ranks for row in fastest.frontier if row.hours <= slow)


def test_a_smaller_share_needs_less_device_time() -> None:
    found = {(row.method, row.twin_share): row for row in search(PlanRequest(**PLAIN)).frontier if row.ranks == 1}
    vanilla = found["vanilla", "1"].step_seconds
    for share, number in {"1": 1, "1/2": 0.5, "1/4": 0.25}.items():
        assert found["recycled", share].step_seconds / vanilla == pytest.approx(1 + number)
        assert found["conadv", share].step_seconds / vanilla == pytest.approx(1 + 5 / 3 * number)


def test_what_cannot_be_met_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="add devices or time"):
        search(PlanRequest(**PLAIN, deadline=1e-6))


def test_the_command_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --search --batch-size 512 --nodes 1 --devices-per-node 4 --lane-ranks 3 --methods vanilla recycled"
    assert cli.main([*words.split(), "--samples", "10"]) == 0
    said = capsys.readouterr().out
    assert "Best on 4 devices: the shortest step" in said
    assert "Step time against devices" in said
    assert "2 clean | adv" in said
    assert cli.main([*words.split(), "--json"]) == 0
    assert {"best", "frontier", "inputs"} == json.loads(capsys.readouterr().out).keys()


def test_a_search_is_rendered_in_lines_of_one_width() -> None:
    assert "idle" in render_search(search(PlanRequest(**{**PLAIN, "lane_ranks": 3}, methods=("conadv",))))
