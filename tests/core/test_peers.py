"""The ranks of a loop of one's own have the same method: what differs is named, and what may differ is not."""

from __future__ import annotations

import linecache
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from support import loops
from support.ranks import Pool
from support.settings import small_cnn

DIFFER = "the methods of the ranks differ: {}; create them with the same arguments on every rank"
WRAPPERS: dict[str, Any] = {"ddp": DistributedDataParallel, "fsdp": fully_shard, "none": lambda model: model}
Settings = dict[str, Any]


def model_for(settings: Settings) -> nn.Module:
    return split_batchnorm(small_cnn(), METHODS[settings.get("method", "conadv")].branches)


def take_steps(model: nn.Module, settings: Settings, steps: int = 3, pause: float = 0) -> None:
    """Make a method with these settings, and train by it."""
    own = {"method": "conadv", "delay": 1, **settings}
    own["attack"] = PGD(**{"epsilon": 4 / 255, **own.get("attack", {})})
    common = {name: own.pop(name) for name in ("seed", "chunk_size") if name in own}
    method = METHODS[own.pop("method")].build(model, F.cross_entropy, own, **common)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    time.sleep(pause)
    for batch in loops.own_batches(steps):
        optimizer.zero_grad()
        method(batch)
        optimizer.step()


def answers(work: Callable[[], None]) -> list[str]:
    """The warnings of some work in a process group, each with the line that it names, and its error, if any."""
    error = []
    with loops.process_group(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        try:
            work()
        except ValueError as refused:
            error = [f"error: {refused}"]
    return [f"{linecache.getline(one.filename, one.lineno).strip()}: {one.message}" for one in heard] + error


# What the ranks do


def train(wrapper: str, *settings: Settings) -> list[str]:
    """Three steps on each rank with its own settings, by one method after the other of one model."""

    def work() -> None:
        own = settings[dist.get_rank() % len(settings)]
        model = WRAPPERS[wrapper](model_for(own))
        for _ in range(2):
            take_steps(model, own)

    return answers(work)


def train_groups() -> list[str]:
    """Two models of two ranks each, with an epsilon and weights of their own."""

    def work() -> None:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        number = dist.get_rank() // 2
        model = DistributedDataParallel(split_batchnorm(small_cnn(seed=number)), process_group=groups[number])
        take_steps(model, {"attack": {"epsilon": (1 + number) / 255}})

    return answers(work)


def train_after_a_trial() -> list[str]:
    """Rank 0 tries a step alone first, with a model that nothing wraps."""

    def work() -> None:
        if dist.get_rank() == 0:
            take_steps(model_for({}), {}, steps=1)
        take_steps(DistributedDataParallel(model_for({})), {})

    return answers(work)


def train_late(seconds: float) -> list[str]:
    """Rank 1 begins its first step so much later."""
    return answers(lambda: take_steps(DistributedDataParallel(model_for({})), {}, pause=seconds * dist.get_rank()))


@pytest.mark.parametrize(
    ("wrapper", "one", "other", "what"),
    [
        ("ddp", {"attack": {"epsilon": 0.1}}, {"attack": {"epsilon": 0.2}}, "epsilon is 0.1 on rank 0 and 0.2"),
        ("ddp", {}, {"attack": {"norm": "l2"}}, "norm is linf on rank 0 and l2"),
        ("ddp", {}, {"delay": 2}, "delay is 1 on rank 0 and 2"),
        ("ddp", {}, {"adv_weight": 0.3}, "adv_weight is 0.5 on rank 0 and 0.3"),
        ("ddp", {"twin_share": "1/4", "chunk_size": 2}, {"chunk_size": 2}, "twin_share is 0.25 on rank 0 and 1.0"),
        ("ddp", {}, {"method": "recycled"}, "method is ConAdv on rank 0 and Recycled"),
        ("ddp", {"method": "sam"}, {"method": "sam", "rho": 0.5}, "rho is 0.05 on rank 0 and 0.5"),
        ("ddp", {"method": "sam"}, {"method": "vanilla"}, "method is Sam on rank 0 and Vanilla"),
        ("fsdp", {}, {"adv_weight": 0.4}, "adv_weight is 0.5 on rank 0 and 0.4"),
        # With sharded weights each pass is a collective.
        ("fsdp", {"chunk_size": 4}, {"chunk_size": 8}, "chunk_size is 4 on rank 0 and 8"),
    ],
)
def test_what_differs_is_named_on_every_rank(pool: Pool, wrapper: str, one: Any, other: Any, what: str) -> None:
    assert pool.run(2, train, wrapper, one, other) == [[f"error: {DIFFER.format(f'{what} on rank 1')}"]] * 2


def test_ranks_that_may_train_models_of_their_own_are_warned_at_the_line_of_the_loop(pool: Pool) -> None:
    warning = DIFFER.format("adv_weight is 0.5 on rank 0 and 0.4 on rank 1")
    assert all(f"method(batch): {warning}" in told for told in pool.run(2, train, "none", {}, {"adv_weight": 0.4}))


@pytest.mark.parametrize(("wrapper", "size"), [("ddp", 4), ("fsdp", 8)])  # FSDP needs as many passes on each rank
def test_seeds_and_chunks_may_differ(pool: Pool, wrapper: str, size: int) -> None:
    assert pool.run(2, train, wrapper, {"seed": 1, "chunk_size": size}, {"seed": 2, "chunk_size": 8}) == [[], []]


def test_only_the_ranks_of_one_model_are_compared(pool: Pool) -> None:
    assert pool.run(4, train_groups) == [[]] * 4


def test_one_rank_may_try_a_step_alone(pool: Pool) -> None:
    assert pool.run(2, train_after_a_trial) == [[], []]


def test_a_late_rank_is_waited_for(pool: Pool) -> None:
    assert pool.run(2, train_late, 1.0) == [[], []]
