"""Promise: the cost of a step, counted in operations, is that of the method's definition.

A forward pass costs 1, the gradients of inputs 1, the gradients of weights 1. Relative to vanilla's 3, disadv and
conadv take 8/3, recycled 2; the first layer, whose input vanilla needs no gradient of, adds its part.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from conadv.roles import Role
from conadv.trainer.build import build_task
from support import tiny
from support.fake_ranks import record_rank
from support.settings import CLASSES, Setting, every_method


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(layer for _ in range(2) for layer in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def residual_net(width: int = 16, blocks: int = 4) -> nn.Module:
    stem = (nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    return nn.Sequential(*stem, *(Block(width) for _ in range(blocks)), *head)


def operations(setting: Setting, attack: PGD, chunk_size: int | None) -> int:
    """Of one step in the middle of training."""
    method = setting.make(split_batchnorm(residual_net()), attack, chunk_size=chunk_size)
    batches = [(torch.rand(4, 3, 8, 8), torch.randint(CLASSES, (4,))) for _ in range(2 * setting.delay + 2)]
    for step, (now, ahead) in enumerate(method.feed(batches)):
        with FlopCounterMode(display=False) as counter:
            method(now, ahead)
        if step == setting.delay:
            return counter.get_total_flops()
    raise AssertionError


@every_method
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_step_costs_what_its_definition_says(setting: Setting, chunk_size: int | None) -> None:
    vanilla = operations(Setting("", "vanilla"), PGD(4 / 255), None)
    ratio = operations(setting, PGD(4 / 255), chunk_size) / vanilla
    low = METHODS[setting.method].work / METHODS["vanilla"].work
    high = {"recycled": 2.05, "conadv": 2.70}.get(setting.method, low)
    assert low - 1e-9 <= ratio <= high + 1e-9


def test_the_table_has_the_costs_of_the_definitions() -> None:
    works = {name: method.work / METHODS["vanilla"].work for name, method in METHODS.items()}
    known = {"vanilla": 1, "recycled": 2, "disadv": 8 / 3, "conadv": 8 / 3, "sam": 2}
    assert {name: works[name] for name in known} == known


@pytest.mark.parametrize(
    ("method", "layout", "share"),
    [
        ("conadv", "3 clean | 3 adv | 2 attack", 1),
        ("conadv", "4 clean | adv | attack", 0.25),
        ("recycled", "4 clean | adv", 0.25),
        ("recycled", "2 clean | adv", 0.5),
    ],
)
def test_uneven_lanes_share_the_work_of_one_process_evenly(method: str, layout: str, share: float) -> None:
    """Of a whole run, without other processes: the ranks of a role do the same work, and all together that of one."""
    lane = Layout.fit(layout, METHODS[method].duties)
    batch = {"batch_size": 24, "chunk_size": 2, "data__augment": "none", "max_steps": 2}

    def run(rank: int, size: int, text: str) -> int:
        changes = {"method": method, "layout": text, "twin_share": share, **batch}
        with FlopCounterMode(display=False) as counter:
            record_rank(rank, size, changes)
        with FlopCounterMode(display=False) as before:
            build_task(tiny.recipe(**changes), torch.device("cpu"))
        return counter.get_total_flops() - before.get_total_flops()

    ranks = [run(rank, lane.world_size, layout) for rank in range(lane.world_size)]
    assert sum(ranks) == run(0, 1, "none")
    for role in lane.counts:
        if role != Role.CLEAN or method != "recycled":  # whose clean pass reaches the images of chunks with twins only
            assert len({done for rank, done in enumerate(ranks) if lane.role(rank) == role}) == 1


@pytest.mark.parametrize(("steps", "low", "high"), [(2, 10 / 3, 3.40), (3, 12 / 3, 4.10)])
def test_each_further_step_of_the_attack_costs_2(steps: int, low: float, high: float) -> None:
    vanilla = operations(Setting("", "vanilla"), PGD(4 / 255), None)
    ratio = operations(Setting("", "conadv"), PGD(4 / 255, 1 / 255, steps=steps), None) / vanilla
    assert low <= ratio <= high


def test_noise_costs_no_attack() -> None:
    """The control that asks for no gradient: twice the images, nothing else."""
    noise = PGD(4 / 255, direction="noise")
    vanilla = operations(Setting("", "vanilla"), PGD(4 / 255), None)
    assert operations(Setting("", "conadv"), noise, None) == 2 * vanilla
