"""LARS against a reference written apart, against another library, and at its edges."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn

from conadv.optim.base import parameter_groups
from conadv.optim.lars import Lars
from support.optimizers import BOTH_WAYS, SHAPES, flat, give_gradients, make_parameters


class Reference:
    """LARS on plain Python lists: one tensor, its numbers in a row."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = list(weights)
        self.velocities = [0.0] * len(weights)

    def step(
        self,
        gradients: list[float],
        lr: float,
        momentum: float,
        decay: float,
        coefficient: float,
        eps: float,
        adapt: bool,
    ) -> None:
        trust = 1.0
        weight_norm = math.sqrt(math.fsum(w * w for w in self.weights))
        gradient_norm = math.sqrt(math.fsum(g * g for g in gradients))
        if adapt and weight_norm > 0 and gradient_norm > 0:
            trust = coefficient * weight_norm / (gradient_norm + decay * weight_norm + eps)
        for i, gradient in enumerate(gradients):
            direction = lr * trust * (gradient + decay * self.weights[i])
            self.velocities[i] = momentum * self.velocities[i] + direction
            self.weights[i] -= self.velocities[i]


@BOTH_WAYS
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("adapt", [True, False])
def test_follows_the_reference_step_by_step(foreach: bool, momentum: float, decay: float, adapt: bool) -> None:
    parameters = make_parameters()
    references = [Reference(flat(parameter)) for parameter in parameters]
    settings: dict[str, Any] = {
        "momentum": momentum,
        "weight_decay": decay,
        "trust_coefficient": 0.02,
        "eps": 1e-3,
        "adapt": adapt,
    }
    optimizer = Lars(parameters, lr=1.0, **settings, foreach=foreach)
    lrs = random.Random(0)
    for step in range(8):
        lr = lrs.uniform(0, 3) if step != 5 else 0.0
        optimizer.param_groups[0]["lr"] = lr
        give_gradients(parameters, step)
        optimizer.step()
        for parameter, reference in zip(parameters, references, strict=True):
            assert parameter.grad is not None
            reference.step(flat(parameter.grad), lr, momentum, decay, 0.02, 1e-3, adapt)
            assert flat(parameter) == pytest.approx(reference.weights, rel=1e-12, abs=1e-13)
    assert len(optimizer.state) == (len(parameters) if momentum else 0)  # without momentum there is nothing to remember


@BOTH_WAYS
def test_defaults_are_those_of_the_reference(foreach: bool) -> None:
    parameters = make_parameters()
    references = [Reference(flat(parameter)) for parameter in parameters]
    optimizer = Lars(parameters, lr=2.0, foreach=foreach)
    for step in range(3):
        give_gradients(parameters, step)
        optimizer.step()
        for parameter, reference in zip(parameters, references, strict=True):
            assert parameter.grad is not None
            reference.step(flat(parameter.grad), 2.0, 0.9, 0.0, 0.001, 0.0, True)
            assert flat(parameter) == pytest.approx(reference.weights, rel=1e-13)


@BOTH_WAYS
def test_agrees_with_another_library_at_a_constant_rate(foreach: bool) -> None:
    """Where the definitions agree: constant lr, matrices, and no eps. (Theirs leaves vectors out by their shape,
    multiplies by lr outside of the momentum, and overwrites the gradients.)"""
    ours, theirs = (make_parameters(shapes=SHAPES[:2]) for _ in range(2))
    settings: dict[str, Any] = {"lr": 3.0, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.1}
    our_optimizer = Lars(ours, **settings, foreach=foreach)
    their_optimizer = pytorch_optimizer.LARS(theirs, **settings)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        our_optimizer.step()
        their_optimizer.step()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@BOTH_WAYS
def test_norms_of_many_short_numbers_neither_overflow_nor_stall(dtype: torch.dtype, foreach: bool) -> None:
    """100,000 times 300 squared is far above the largest float16, and a bfloat16 sum of ones stalls at 256."""
    weight = nn.Parameter(torch.full((1000, 100), 300.0, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    Lars([weight], lr=1.0, trust_coefficient=0.5, foreach=foreach).step()  # trust = 0.5 · 300
    assert weight[0, 0].item() == weight[-1, -1].item() == 150.0


@BOTH_WAYS
def test_a_tensor_without_norm_takes_a_plain_step(foreach: bool) -> None:
    zero_weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    zero_weight.grad = torch.full_like(zero_weight, 2.0)
    zero_gradient = nn.Parameter(torch.full((3, 2), 2.0, dtype=torch.float64))
    zero_gradient.grad = torch.zeros_like(zero_gradient)
    empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
    empty.grad = torch.zeros_like(empty)
    Lars([zero_weight, zero_gradient, empty], lr=0.5, weight_decay=0.1, foreach=foreach).step()
    assert flat(zero_weight) == pytest.approx([-1.0] * 6)
    assert flat(zero_gradient) == pytest.approx([2.0 - 0.5 * 0.1 * 2.0] * 6)


@BOTH_WAYS
def test_without_decay_two_zero_norms_make_no_nan(foreach: bool) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros_like(weight)
    Lars([weight], lr=1.0, foreach=foreach).step()
    assert flat(weight) == [0.0] * 4


def test_groups_follow_their_own_rules_in_one_optimizer() -> None:
    model = nn.Linear(2, 2).double()
    references = {name: Reference(flat(parameter)) for name, parameter in model.named_parameters()}
    optimizer = Lars(parameter_groups(model, 0.1), lr=0.5, weight_decay=7.0)
    for step in range(3):
        give_gradients(list(model.parameters()), step)
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            weight = name == "weight"
            gradients = flat(parameter.grad)
            references[name].step(gradients, 0.5, 0.9, 0.1 if weight else 0.0, 0.001, 0.0, weight)
            assert flat(parameter) == pytest.approx(references[name].weights, rel=1e-12)
