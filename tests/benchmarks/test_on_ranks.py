"""What two ranks of a benchmark report; they are started once for all tasks. No time is asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stragglers
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.workload import Workload
from step_parts import PARTS, main

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)
TASKS = ("composed:exchange", "step_parts:on_rank", "conadv.study.bench.layout:together")
ROUNDS = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reported() -> dict[str, Any]:
    """What each task returned on rank 0."""
    return dict(zip(TASKS, run_ranks(TASKS, 2, TINY, ROUNDS), strict=True))


@pytest.fixture(scope="module")
def rows(reported: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    return {(row["name"], row["place"]): row["seconds"] for row in reported["step_parts:on_rank"]}


def test_the_exchange_is_reported_by_method(reported) -> None:
    exchange = reported["composed:exchange"]
    assert exchange.keys() == {"vanilla", "recycled", "disadv"}
    assert all(len(rounds) == ROUNDS and min(rounds) >= 0 for found in exchange.values() for rounds in found.values())
    assert min(exchange["recycled"]["hand-off"]) > 0


def test_every_contender_is_reported_round_by_round(reported) -> None:
    found = reported["conadv.study.bench.layout:together"]
    assert found["wall"].keys() == found["work"].keys() == {"vanilla-1", "beside", "vanilla-2", "recycled", "disadv"}
    assert all(len(rounds) == ROUNDS and min(rounds) > 0 for rounds in found["wall"].values())


def test_the_profile_shows_who_does_what(rows) -> None:
    assert ("vanilla-1", "rank 0") in rows and ("vanilla-1", "rank 1") not in rows
    assert len(rows) == 9
    for seconds in rows.values():
        assert tuple(seconds) == PARTS
        assert min(seconds["forward"], seconds["backward"], seconds["optimizer"], seconds["statistics"]) > 0
    packing = {place for place, seconds in rows.items() if seconds["packing"] > 0}
    assert packing == {("recycled", "rank 0 (lane 0, clean)"), ("recycled", "rank 1 (lane 0, adv)")}
    attacking = {place for place, seconds in rows.items() if seconds["attack"] > 0}
    assert attacking == {("disadv", "rank 1 (lane 0, adv+attack)")}
    assert all(seconds["waiting for the exchange"] for seconds in rows.values())


def test_it_is_printed_as_a_table(monkeypatch, capsys, rows) -> None:
    found = [{"name": name, "place": place, "seconds": seconds} for (name, place), seconds in rows.items()]
    monkeypatch.setattr("step_parts.run_ranks", lambda tasks, ranks, workload, rounds: [found])
    main()
    out = capsys.readouterr().out
    assert "rank 1 (lane 0, adv+attack)" in out and "forward" in out


def test_late_attack_ranks_are_timed_with_each_delay(capsys) -> None:
    stragglers.main(rounds=1, json=True)
    results = json.loads(capsys.readouterr().out)["results"]
    assert [found["name"] for found in results] == [f"late-{delay}/delay-{delay}" for delay in (1, 2, 4)]
    assert all(found["ratio"] > 0 and found["n"] == 1 for found in results)
