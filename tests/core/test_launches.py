"""How many operators a step starts, and how often it waits for a value: counted, so that it holds on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from conadv.core.splitbn import update_running_stats
from conadv.optim.base import parameter_groups
from conadv.optim.lars import Lars
from conadv.ranks.layout import Layout
from conadv.ranks.member import Member
from conadv.ranks.world import World
from conadv.task.models import build_model

# Forward and backward passes of a step; the update comes once.
PASSES = {"vanilla": 1, "recycled": 2, "conadv": 3}
IMAGES, LABELS = torch.rand(2, 3, 32, 32), torch.tensor([1, 2])
DEEP = {"name": "resnet50", "classes": 10, "in_channels": 3, "width": 4}  # narrow: as many operators, less work


class Operators(TorchDispatchMode):
    """Counts operators that start work on a device, which views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and function.overloadpacket is not torch.ops.aten.detach:
            self.counts[str(function.overloadpacket)] += 1
        return function(*args, **(kwargs or {}))


def counted(step: Callable[[], None]) -> Counter[str]:
    """The operators of the third step: the first ones look for misuse."""
    step()
    step()
    with Operators() as operators:
        step()
    return operators.counts


def plain_step(passes: int) -> Callable[[], None]:
    model = build_model(**DEEP)
    optimizer = Lars(parameter_groups(model, 5e-4), lr=0.1, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            F.cross_entropy(model(IMAGES), LABELS).backward()
        optimizer.step()

    return step


def own_step(name: str) -> Callable[[], None]:
    info = METHODS[name]
    model = split_batchnorm(build_model(**DEEP), info.branches)
    options = {"attack": PGD(4 / 255), "delay": info.default_delay, "adv_weight": 0.5}
    method = info.build(model, F.cross_entropy, options, seed=0)
    optimizer = Lars(parameter_groups(model, 5e-4), lr=0.1, foreach=True)
    member = Member(World(0, 1, torch.device("cpu")), Layout.fit(None, info.duties, 1), model, method, chunks=1)

    def step() -> None:
        optimizer.zero_grad()
        member.step((IMAGES, LABELS), None).read()
        update_running_stats(model)
        optimizer.step()

    return step


@pytest.mark.parametrize("name", PASSES)
def test_a_step_starts_hardly_more_operators_than_its_passes_and_reads_no_scalar(name: str) -> None:
    counts = counted(own_step(name))
    assert counts.total() <= 1.15 * counted(plain_step(PASSES[name])).total()
    # The exchange reads all its numbers at once, by `tolist`, which is not among these.
    assert not {"aten._local_scalar_dense", "aten.is_nonzero"} & counts.keys()
