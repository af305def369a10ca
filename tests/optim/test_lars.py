"""LARS against a reference written apart, against another library, and at its edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn

from conadv.optim.base import parameter_groups
from conadv.optim.lars import Lars
from support.optimizers import BOTH_WAYS, SHAPES, assert_follows, assert_same_steps, flat, make_parameters

LRS = [2.5, 0.4, 1.3, 0.0, 3.0, 1.0]


class Reference:
    """LARS on plain Python lists: one tensor, its numbers in a row. The defaults are those of the paper."""

    def __init__(
        self,
        weights: list[float],
        momentum: float = 0.9,
        decay: float = 0.0,
        coefficient: float = 0.001,
        eps: float = 0.0,
        adapt: bool = True,
    ) -> None:
        self.weights, self.velocities = list(weights), [0.0] * len(weights)
        self.momentum, self.decay, self.coefficient, self.eps, self.adapt = momentum, decay, coefficient, eps, adapt

    def step(self, gradients: list[float], lr: float) -> None:
        trust = 1.0
        weight_norm = math.sqrt(math.fsum(w * w for w in self.weights))
        gradient_norm = math.sqrt(math.fsum(g * g for g in gradients))
        if self.adapt and weight_norm > 0 and gradient_norm > 0:
            trust = self.coefficient * weight_norm / (gradient_norm + self.decay * weight_norm + self.eps)
        for i, gradient in enumerate(gradients):
            direction = lr * trust * (gradient + self.decay * self.weights[i])
            self.velocities[i] = self.momentum * self.velocities[i] + direction
            self.weights[i] -= self.velocities[i]


@BOTH_WAYS
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("adapt", [True, False])
def test_follows_the_reference_step_by_step(foreach: bool, momentum: float, decay: float, adapt: bool) -> None:
    parameters = make_parameters()
    references = [Reference(flat(parameter), momentum, decay, 0.02, 1e-3, adapt) for parameter in parameters]
    optimizer = Lars(parameters, 1.0, momentum, decay, 0.02, 1e-3, adapt=adapt, foreach=foreach)
    assert_follows(optimizer, references, LRS)
    assert len(optimizer.state) == (len(parameters) if momentum else 0)  # without momentum there is nothing to remember


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_defaults_are_those_of_the_reference_and_short_dtypes_follow_it_roughly(
    dtype: torch.dtype, foreach: bool
) -> None:
    parameters = make_parameters(dtype)
    references = [Reference(flat(parameter)) for parameter in parameters]
    assert_follows(Lars(parameters, lr=2.0, foreach=foreach), references, [2.0] * 4, 20 * torch.finfo(dtype).eps)


@BOTH_WAYS
def test_agrees_with_another_library_at_a_constant_rate(foreach: bool) -> None:
    """Where the definitions agree: constant lr, matrices, and no eps. (Theirs leaves vectors out by their shape,
    multiplies by lr outside of the momentum, and overwrites the gradients.)"""
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.1}
    ours = Lars(make_parameters(shapes=SHAPES[:2]), 3.0, **settings, foreach=foreach)
    theirs = pytorch_optimizer.LARS(make_parameters(shapes=SHAPES[:2]), 3.0, **settings)
    assert_same_steps(ours, theirs, [3.0] * 6)


@BOTH_WAYS
def test_a_tensor_without_norm_takes_a_plain_step(foreach: bool) -> None:
    weights = [nn.Parameter(torch.full((3, 2), value, dtype=torch.float64)) for value in (0.0, 2.0, 0.0)]
    empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
    for weight, gradient in zip([*weights, empty], (2.0, 0.0, 0.0, 0.0), strict=True):
        weight.grad = torch.full_like(weight, gradient)
    Lars([*weights, empty], lr=0.5, weight_decay=0.1, foreach=foreach).step()
    assert [flat(weight)[0] for weight in weights] == pytest.approx([-1.0, 2.0 - 0.5 * 0.1 * 2.0, 0.0])
    weights[2].grad.zero_()
    Lars(weights[2:], lr=1.0, foreach=foreach).step()
    assert flat(weights[2]) == [0.0] * 6, "without decay, two zero norms make no NaN"


def test_groups_follow_their_own_rules_in_one_optimizer() -> None:
    model = nn.Linear(2, 2).double()
    references = [Reference(flat(model.weight), decay=0.1), Reference(flat(model.bias), adapt=False)]
    assert_follows(Lars(parameter_groups(model, 0.1), lr=0.5, weight_decay=7.0), references, [0.5] * 3)
