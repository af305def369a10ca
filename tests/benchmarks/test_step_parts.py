"""The parts of a step, rank by rank. No time is asserted."""

from __future__ import annotations

import pytest

from conadv.study.bench.contender import Contender
from conadv.study.bench.layout import role_alone
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.workload import Workload
from step_parts import PARTS, main, profile

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)


@pytest.fixture(scope="module")
def rows():
    """What two ranks report."""
    (found,) = run_ranks(["step_parts:on_rank"], 2, TINY, 0)
    return {(row["name"], row["place"]): row["seconds"] for row in found}


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


def test_the_parts_of_a_profile_are_the_whole() -> None:
    step = role_alone(Contender("conadv", "conadv", "clean | adv | attack"), 1, TINY, steps=1)
    seconds = profile(step)
    assert tuple(seconds) == PARTS
    assert min(seconds["forward"], seconds["backward"], seconds["packing"], seconds["optimizer"]) > 0
    assert seconds["attack"] == 0
