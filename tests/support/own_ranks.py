"""Loops of a user's own on several ranks, for tests/core/test_peers.py: functions that every process can import."""

from __future__ import annotations

import linecache
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from support import loops
from support.settings import small_cnn

Settings = dict[str, Any]


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": _ddp, "fsdp": _fsdp, "none": lambda model: model}


def _make(model: nn.Module, settings: Settings) -> Any:
    own = {"method": "conadv", "delay": 1, **settings}
    attack = PGD(**{"epsilon": 4 / 255, **own.pop("attack", {})})
    common = {name: own.pop(name) for name in ("seed", "chunk_size") if name in own}
    return METHODS[own.pop("method")].build(model, F.cross_entropy, {"attack": attack, **own}, **common)


def _train(method: Any, model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loops.own_batches(steps):
        optimizer.zero_grad()
        method(batch)
        optimizer.step()


def _model(settings: Settings) -> nn.Module:
    branches = METHODS[settings.get("method", "conadv")].branches
    return split_batchnorm(small_cnn(), branches)


def _answers(work: Callable[[], None]) -> list[str]:
    """The warnings of some work, and its error, if any."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        try:
            work()
        except ValueError as error:
            return [*(str(one.message) for one in heard), f"error: {error}"]
    return [str(one.message) for one in heard]


def warned_lines(*settings: Settings) -> list[str]:
    """The lines of the loop that warnings about methods that differ name."""
    own = settings[loops.place()[0] % len(settings)]
    model = _model(own)
    with loops.process_group(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        _train(_make(model, own), model)
    found = [one for one in heard if "the methods of the ranks differ" in str(one.message)]
    return [linecache.getline(one.filename, one.lineno).strip() for one in found]


def train(wrapper: str, *settings: Settings) -> list[str]:
    """Three steps on each rank with its own settings, by one method after the other of one model."""
    own = settings[loops.place()[0] % len(settings)]

    def work() -> None:
        model = WRAPPERS[wrapper](_model(own))
        for _ in range(2):
            _train(_make(model, own), model)

    with loops.process_group():
        return _answers(work)


def train_groups() -> list[str]:
    """Two models of two ranks each, with an epsilon and weights of their own."""
    with loops.process_group():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        number = dist.get_rank() // 2
        model = DistributedDataParallel(split_batchnorm(small_cnn(seed=number)), process_group=groups[number])
        return _answers(lambda: _train(_make(model, {"attack": {"epsilon": (1 + number) / 255}}), model))


def train_after_a_trial() -> list[str]:
    """Rank 0 tries a step alone first, with a model that nothing wraps."""

    def work() -> None:
        if dist.get_rank() == 0:
            _train(_make(other := _model({}), {}), other, steps=1)
        model = _ddp(_model({}))
        _train(_make(model, {}), model)

    with loops.process_group():
        return _answers(work)


def train_late(seconds: float) -> list[str]:
    """Rank 1 begins its first step so much later."""

    def work() -> None:
        model = _ddp(_model({}))
        method = _make(model, {})
        if dist.get_rank() == 1:
            time.sleep(seconds)
        _train(method, model)

    with loops.process_group():
        return _answers(work)
