"""LAMB against a reference written apart, against AdamW, against another library, and at its edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from conadv.optim.lamb import Lamb
from support.optimizers import BOTH_WAYS, assert_follows, flat, give_gradients, make_parameters


class Reference:
    """Algorithm 2 of the paper on plain Python lists: one tensor, its numbers in a row."""

    def __init__(self, weights: list[float], betas: tuple[float, float], eps: float, decay: float, adapt: bool) -> None:
        self.weights, self.steps = list(weights), 0
        self.means, self.squares = [0.0] * len(weights), [0.0] * len(weights)
        self.betas, self.eps, self.decay, self.adapt = betas, eps, decay, adapt

    def step(self, gradients: list[float], lr: float) -> None:
        self.steps += 1
        first, second = self.betas
        updates = []
        for i, gradient in enumerate(gradients):
            self.means[i] = first * self.means[i] + (1 - first) * gradient
            self.squares[i] = second * self.squares[i] + (1 - second) * gradient**2
            mean = self.means[i] / (1 - first**self.steps)
            square = self.squares[i] / (1 - second**self.steps)
            updates.append(mean / (math.sqrt(square) + self.eps) + self.decay * self.weights[i])
        weight_norm = math.sqrt(math.fsum(w * w for w in self.weights))
        update_norm = math.sqrt(math.fsum(u * u for u in updates))
        trust = weight_norm / update_norm if self.adapt and weight_norm > 0 and update_norm > 0 else 1.0
        self.weights = [w - lr * trust * u for w, u in zip(self.weights, updates, strict=True)]


@BOTH_WAYS
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.8, 0.0)])
@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("adapt", [True, False])
def test_follows_the_reference_step_by_step(foreach, betas, decay, adapt):
    parameters = make_parameters()
    references = [Reference(flat(parameter), betas, 1e-3, decay, adapt) for parameter in parameters]
    optimizer = Lamb(parameters, 1.0, betas, 1e-3, decay, adapt=adapt, foreach=foreach)
    assert_follows(optimizer, references, [0.25, 0.02, 0.13, 0.0, 0.3, 0.1], rel=1e-11)


@BOTH_WAYS
def test_a_tensor_without_norm_takes_a_plain_step(foreach):
    zero_weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    zero_weight.grad = torch.full_like(zero_weight, 2.0)
    nothing = nn.Parameter(torch.full((3, 2), 2.0, dtype=torch.float64))
    nothing.grad = torch.zeros_like(nothing)
    empty = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
    empty.grad = torch.zeros_like(empty)
    Lamb([zero_weight, nothing, empty], lr=0.5, foreach=foreach).step()
    assert flat(zero_weight) == pytest.approx([-0.5] * 6, rel=1e-5)  # Adam's first step: lr against the sign
    assert flat(nothing) == [2.0] * 6


@BOTH_WAYS
def test_steps_are_counted_for_each_parameter(foreach):
    parameters = make_parameters()
    optimizer = Lamb(parameters, lr=0.1, weight_decay=0.1, foreach=foreach)
    late = Reference(flat(parameters[1]), (0.9, 0.999), 1e-6, 0.1, True)
    for step in range(2):
        give_gradients(parameters, step)
        if step == 0:
            parameters[1].grad = None
        optimizer.step()
    assert parameters[1].grad is not None
    late.step(flat(parameters[1].grad), 0.1)
    assert flat(parameters[1]) == pytest.approx(late.weights, rel=1e-12)
