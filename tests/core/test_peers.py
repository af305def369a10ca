"""The ranks of a loop of one's own have the same method: what differs is named, and what may differ is not."""

from __future__ import annotations

from typing import Any

import pytest

from support import own_ranks
from support.ranks import Pool

DIFFER = "the methods of the ranks differ: {}; create them with the same arguments on every rank"


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        ({"attack": {"epsilon": 0.1}}, {"attack": {"epsilon": 0.2}}, "epsilon is 0.1 on rank 0 and 0.2 on rank 1"),
        ({}, {"attack": {"norm": "l2"}}, "norm is linf on rank 0 and l2 on rank 1"),
        ({}, {"delay": 2}, "delay is 1 on rank 0 and 2 on rank 1"),
        ({}, {"adv_weight": 0.3}, "adv_weight is 0.5 on rank 0 and 0.3 on rank 1"),
        ({"twin_share": "1/4", "chunk_size": 2}, {"chunk_size": 2}, "twin_share is 0.25 on rank 0 and 1.0 on rank 1"),
        ({}, {"method": "recycled"}, "method is ConAdv on rank 0 and Recycled on rank 1"),
        ({"method": "sam"}, {"method": "sam", "rho": 0.5}, "rho is 0.05 on rank 0 and 0.5 on rank 1"),
        ({"method": "sam"}, {"method": "vanilla"}, "method is Sam on rank 0 and Vanilla on rank 1"),
    ],
)
def test_what_differs_is_named_on_every_rank(pool: Pool, one: Any, other: Any, what: str) -> None:
    assert pool.run(2, own_ranks.train, "ddp", one, other) == [[f"error: {DIFFER.format(what)}"]] * 2


def test_with_sharded_weights_too(pool: Pool) -> None:
    answers = pool.run(2, own_ranks.train, "fsdp", {"adv_weight": 0.5}, {"adv_weight": 0.4})
    assert answers == [[f"error: {DIFFER.format('adv_weight is 0.5 on rank 0 and 0.4 on rank 1')}"]] * 2


def test_with_sharded_weights_chunks_are_compared_since_each_pass_is_a_collective(pool: Pool) -> None:
    answers = pool.run(2, own_ranks.train, "fsdp", {"chunk_size": 4}, {"chunk_size": 8})
    assert answers == [[f"error: {DIFFER.format('chunk_size is 4 on rank 0 and 8 on rank 1')}"]] * 2


def test_ranks_that_may_train_models_of_their_own_are_warned(pool: Pool) -> None:
    answers = pool.run(2, own_ranks.train, "none", {"adv_weight": 0.5}, {"adv_weight": 0.4})
    assert all(DIFFER.format("adv_weight is 0.5 on rank 0 and 0.4 on rank 1") in answer for answer in answers)


def test_the_warning_names_the_line_of_the_loop(pool: Pool) -> None:
    assert pool.run(2, own_ranks.warned_lines, {"adv_weight": 0.5}, {"adv_weight": 0.4}) == [["method(batch)"]] * 2


@pytest.mark.parametrize(("wrapper", "size"), [("ddp", 4), ("fsdp", 8)])  # FSDP needs as many passes on each rank
def test_seeds_and_chunks_may_differ(pool: Pool, wrapper: str, size: int) -> None:
    answers = pool.run(2, own_ranks.train, wrapper, {"seed": 1, "chunk_size": size}, {"seed": 2, "chunk_size": 8})
    assert answers == [[], []]


def test_only_the_ranks_of_one_model_are_compared(pool: Pool) -> None:
    assert pool.run(4, own_ranks.train_groups) == [[]] * 4


def test_one_rank_may_try_a_step_alone(pool: Pool) -> None:
    assert pool.run(2, own_ranks.train_after_a_trial) == [[], []]


def test_a_late_rank_is_waited_for(pool: Pool) -> None:
    assert pool.run(2, own_ranks.train_late, 1.0) == [[], []]
