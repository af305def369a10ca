"""The layout benchmark: what is compared, and what ranks of their own report. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from conadv.core.catalog import METHODS
from conadv.machine import usable_cores
from conadv.parallel.collectives import World
from conadv.study.bench import layout
from conadv.study.bench.alternate import silent
from conadv.study.bench.contender import Contender, build_share
from conadv.study.bench.layout import LANES, contenders, vanilla_of
from conadv.study.bench.ranks import places, run_ranks
from conadv.study.bench.workload import Workload

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)
CPU = torch.device("cpu")
WIDTHS = {name: method.overlapped.count("|") + 1 for name, method in METHODS.items() if name != "vanilla"}
SECONDS = {"wall": [2.0, 4.0], "work": [1.0, 2.0]}


@pytest.fixture
def measure(monkeypatch):
    """The benchmark on a machine with room for so many ranks, with ranks that report the same for every contender."""
    started, composed = [], []

    def with_places(count: int):
        def ranks(tasks, size, workload, rounds):
            started.append(size)
            lanes = [one for one in LANES if one.lane.world_size == size]
            everyone = [*contenders(size), *lanes, *map(vanilla_of, lanes)]
            return [{clock: {one.name: rounds for one in everyone} for clock, rounds in SECONDS.items()}]

        def compose(lanes, *_):
            composed.extend(one.name for one in lanes)
            return {one.name: [2.0, 3.0] for one in (*lanes, *map(vanilla_of, lanes))}

        monkeypatch.setattr(layout, "places", lambda: count)
        monkeypatch.setattr(layout, "compose", compose)
        monkeypatch.setattr(layout, "run_ranks", ranks)
        return layout.measure(TINY, 2, silent), started, composed

    return with_places


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_method_whose_ranks_have_no_cores_of_their_own_is_left_out_with_a_note(measure, count) -> None:
    found, started, _ = measure(count)
    results = [result for result in found.results if "+" not in result.name]
    names = {result.name for result in results}
    measured = {method: width for method, width in WIDTHS.items() if width <= count}
    assert {f"{method}/vanilla-{width}" for method, width in measured.items()} <= names
    assert {f"{method}/vanilla-1" for method in measured} <= names
    missing = WIDTHS.keys() - measured.keys()
    assert not any(name.startswith(method) for name in names for method in missing)
    assert all(result.to_json()["composed"] is False for result in results)
    assert started == sorted(set(measured.values()))
    compared = [result.name for result in results if not result.name.startswith("beside")]
    assert len(compared) == len(set(compared)), "nothing is compared twice"
    notes = " ".join(note for note in found.notes if note.startswith("without"))
    assert all(method in notes for method in missing)
    assert ("benchmarks/composed.py" in notes) == bool(missing)


def test_goals_are_beside_what_they_are_for(measure) -> None:
    goals = {result.name: str(result.goal) for result in measure(2)[0].results if result.goal is not None}
    assert goals == {"recycled/vanilla-2": "≤ 1.03", "recycled/vanilla-1": "≤ 1.06", "disadv/vanilla-2": "≥ 1.5"}


# --- several ranks per role ---


@pytest.mark.parametrize("count", [1, 4, 8])
def test_lanes_that_do_not_fit_the_machine_are_composed(measure, count) -> None:
    found, started, composed = measure(count)
    widths = {*WIDTHS.values(), *(one.lane.world_size for one in LANES)}
    assert composed == [one.name for one in LANES if one.lane.world_size > count]
    assert started == sorted(width for width in widths if width <= count)
    assert {result.name: result.composed for result in found.results if "+" in result.name} == {
        f"{one.name}/vanilla": one.name in composed for one in LANES
    }


def test_a_composed_step_is_that_of_the_slowest_role() -> None:
    seconds = layout.compose([LANES[0]], TINY, 1, silent)
    assert seconds.keys() == {"recycled-2+1", "recycled-2+1 vanilla"}
    assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in seconds.values())


def test_nothing_is_composed_where_everything_fits() -> None:
    assert layout.compose([], TINY, 1, silent) == {}


def test_every_lane_has_as_many_chunks_per_rank_as_its_vanilla() -> None:
    assert {one.name: (one.chunks, vanilla_of(one).chunks) for one in LANES} == {
        "recycled-2+1": (2, 1),
        "recycled-4+1": (4, 1),
        "conadv-2+2+1": (2, 1),
        "conadv-3+3+2": (6, 2),
    }


# --- ranks ---


def test_a_rank_that_fails_is_reported(capfd) -> None:
    with pytest.raises(ChildProcessError, match="failed"):
        run_ranks(["conadv.study.bench.layout:nonsense"], 1, TINY, 1)
    assert "nonsense" in capfd.readouterr().err


def test_a_rank_without_a_part_sleeps() -> None:
    assert build_share(Contender("vanilla-1", "vanilla", ranks="alone"), TINY, World(1, 2, CPU), 1) is None


def test_places_are_gpus_where_there_are_any(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert places() == 5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert places() == len(usable_cores())
