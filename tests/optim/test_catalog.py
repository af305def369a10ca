"""The table of optimizers: each is built with what a recipe says, and with the same parameter groups."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn

from conadv.config import Optimizer
from conadv.optim import OPTIMIZERS, build_optimizer
from conadv.optim.lamb import Lamb
from conadv.optim.lars import Lars
from conadv.optim.muon import Muon

CLASSES = {"lars": Lars, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lamb": Lamb, "muon": Muon}


def build(name: str, **settings: float) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    return build_optimizer(model, asdict(Optimizer(name=name, **settings)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_leaves_biases_and_batchnorm_undecayed(name):
    optimizer = build(name, lr=0.3, weight_decay=0.2)
    assert type(optimizer) is CLASSES[name]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    assert all(group["lr"] == 0.3 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["lars", "lamb", "muon"])
def test_those_with_a_trust_ratio_leave_biases_and_batchnorm_unadapted(name):
    assert [group["adapt"] for group in build(name).param_groups] == [True, False]


def test_the_fields_of_momentum_reach_those_that_take_them():
    assert [build(name, momentum=0.8).param_groups[0]["momentum"] for name in ("sgd", "muon")] == [0.8, 0.8]
    group = build("lars", momentum=0.8).param_groups[0]
    assert (group["momentum"], group["trust_coefficient"], group["eps"]) == (0.8, 0.001, 0.0)


@pytest.mark.parametrize(("name", "eps"), [("adamw", 1e-8), ("lamb", 1e-6), ("muon", 1e-8)])
def test_adam_has_the_usual_decays(name, eps):
    group = build(name).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.999), eps)
