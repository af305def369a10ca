"""Lanes of several ranks per role: measured where they fit, composed where they do not. No time is asserted."""

from __future__ import annotations

import pytest

from conadv.study.bench import uneven
from conadv.study.bench.alternate import silent
from conadv.study.bench.uneven import LANES
from conadv.study.bench.workload import Workload

TINY = Workload("resnet8", width=4, chunk_size=2, image_size=8)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_lanes_that_do_not_fit_the_machine_are_composed(count, monkeypatch) -> None:
    composed, started = [], []

    def compose(lanes, *_):
        composed.extend(lane.name for lane in lanes)
        return {name: [2.0, 3.0] for lane in lanes for name in (lane.name, f"{lane.name} vanilla")}

    def ranks(tasks, size, workload, rounds):
        started.append(size)
        fitting = [one.name for lane in LANES if lane.lane.world_size == size for one in lane.contenders]
        return [{"wall": {name: [4.0, 4.0] for name in fitting}}]

    monkeypatch.setattr(uneven, "places", lambda: count)
    monkeypatch.setattr(uneven, "compose", compose)
    monkeypatch.setattr(uneven, "run_ranks", ranks)
    found = uneven.measure(TINY, 2, silent)
    assert composed == [lane.name for lane in LANES if lane.lane.world_size > count]
    assert started == sorted({lane.lane.world_size for lane in LANES if lane.lane.world_size <= count})
    assert {result.name: result.composed for result in found.results} == {
        f"{lane.name}/vanilla": lane.name in composed for lane in LANES
    }


def test_a_composed_step_is_that_of_the_slowest_role() -> None:
    few = [LANES[0]]
    seconds = uneven.compose(few, TINY, 1, silent)
    assert seconds.keys() == {"recycled-2+1", "recycled-2+1 vanilla"}
    assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in seconds.values())


def test_every_lane_has_as_many_chunks_per_rank_as_its_vanilla() -> None:
    assert {lane.name: (lane.chunks, lane.clean_chunks) for lane in LANES} == {
        "recycled-2+1": (2, 1),
        "recycled-4+1": (4, 1),
        "conadv-2+2+1": (2, 1),
        "conadv-3+3+2": (6, 2),
    }
