"""Ranks that were started differently end before the first step, all with status 2 and one line in total."""

from __future__ import annotations

import json
import re

import pytest
import torch

from conadv.ranks.agreement import check_agreement
from conadv.ranks.world import World
from support import ranks, tasks, tiny

FACTS = {"flags": {"optimizer.lr": 0.1, "epochs": 3}, "data": {"training images": 60}, "software": {"torch": "2.6.0"}}


def other(group: str, key: str, value: object) -> dict[str, dict[str, object]]:
    return {**FACTS, group: {**FACTS[group], key: value}}


class Compared(World):
    """Rank 1, while rank 0 has FACTS."""

    def broadcast(self, data: bytes, source: int | None = None) -> bytes:
        return json.dumps(FACTS).encode()

    def barrier(self) -> None:
        raise AllHaveCompared


class AllHaveCompared(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (
            other("flags", "optimizer.lr", 0.2),
            "optimizer.lr is 0.2, on rank 0 0.1: start all ranks with the same flags",
        ),
        (
            other("flags", "layout", "clean | adv"),
            "layout is clean | adv, on rank 0 none: start all ranks with the same flags",
        ),
        (other("data", "training images", 61), "training images is 61, on rank 0 60: give all ranks the same data"),
        (other("software", "torch", "2.7.1"), "torch is 2.7.1, on rank 0 2.6.0: install the same on all machines"),
        ({**FACTS, "flags": {"epochs": 3}}, "optimizer.lr is none, on rank 0 0.1: start all ranks with the same flags"),
    ],
    ids=["another value", "another key", "other data", "another version", "without a key"],
)
def test_a_rank_says_in_what_it_differs(facts, line):
    world = Compared(1, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        check_agreement(world, facts)
    with pytest.raises(AllHaveCompared):
        check_agreement(world, FACTS)


def test_ranks_wait_for_long_work_on_rank_0_and_not_for_a_lost_one(pool):
    """Four times as long as the timeout: each wait is short."""
    assert pool.run(2, tasks.ask_main_for_long, 4.0, 1.0) == [b"found"] * 2


def test_a_run_whose_ranks_have_other_flags_ends_with_one_line(tmp_path):
    words = [*tiny.words(), "--run-dir", str(tmp_path / "run")]
    run = ranks.Run(tmp_path / "run", words, 2, odd=tiny.words(epochs=4))
    try:
        assert run.statuses() == [2, 2], run.said()
        assert run.complaints() == [
            "error: rank 1 (lane 1, clean+adv+attack): epochs is 4, on rank 0 3: start all ranks with the same flags"
        ]
        assert not (tmp_path / "run").exists()
    finally:
        run.close()
