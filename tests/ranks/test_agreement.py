"""Ranks that were started differently end before the first step, all with status 2 and one line in total."""

from __future__ import annotations

import pytest

from support import ranks, tasks, tiny

FACTS = {"flags": {"optimizer.lr": 0.1, "epochs": 3}, "data": {"training images": 60}, "software": {"torch": "2.6.0"}}


def other(group: str, key: str, value: object) -> dict[str, dict[str, object]]:
    return {**FACTS, group: {**FACTS[group], key: value}}


@pytest.mark.parametrize(
    ("odd", "facts", "line"),
    [
        (1, FACTS, None),
        (
            1,
            other("flags", "optimizer.lr", 0.2),
            "rank 1 has optimizer.lr 0.2, rank 0 has 0.1: start all ranks with the same flags",
        ),
        (
            2,
            other("flags", "layout", "clean | adv"),
            "rank 2 has layout clean | adv, rank 0 has none: start all ranks with the same flags",
        ),
        (
            0,
            other("data", "training images", 61),
            "rank 1 has training images 60, rank 0 has 61: give all ranks the same data",
        ),
        (
            2,
            other("software", "torch", "2.7.1"),
            "rank 2 has torch 2.7.1, rank 0 has 2.6.0: install the same on all machines",
        ),
    ],
    ids=["the same", "another value", "another key", "rank 0 itself", "another version"],
)
def test_all_ranks_know_who_differs_and_in_what(odd, facts, line, pool):
    assert pool.run(3, tasks.agree, FACTS, odd, facts) == [line] * 3


def test_what_rank_0_finds_wrong_all_ranks_raise(pool):
    assert pool.run(3, tasks.ask_main, "no such folder") == ["no such folder"] * 3
    assert pool.run(3, tasks.ask_main, "") == [b"found"] * 3


def test_ranks_wait_for_long_work_on_rank_0_and_not_for_a_lost_one(pool):
    """Four times as long as the timeout: each wait is short."""
    assert pool.run(2, tasks.ask_main_for_long, 4.0, 1.0) == [b"found"] * 2


@pytest.mark.parametrize(("rank", "line"), [(0, "too few images"), (2, "rank 2: too few images"), (9, "made")])
def test_what_any_rank_finds_wrong_all_ranks_raise(rank, line, pool):
    assert pool.run(3, tasks.fail_on, rank) == [line] * 3


def test_a_run_whose_ranks_have_other_flags_ends_with_one_line(tmp_path):
    words = [*tiny.words(), "--run-dir", str(tmp_path / "run")]
    run = ranks.Run(tmp_path / "run", words, 2, odd=tiny.words(epochs=4))
    try:
        assert run.statuses() == [2, 2], run.said()
        assert run.complaints() == ["error: rank 1 has epochs 4, rank 0 has 3: start all ranks with the same flags"]
        assert not (tmp_path / "run").exists()
    finally:
        run.close()
