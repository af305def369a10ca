"""Parameters and gradients for the tests of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

BOTH_WAYS = pytest.mark.parametrize("foreach", [False, True], ids=["each", "together"])
SHAPES = [(4, 3, 3, 3), (5, 4), (7,), ()]
MATRICES = [(4, 3, 3, 3), (5, 4), (4, 5)]


def make_parameters(dtype: torch.dtype = torch.float64, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.to(parameter.dtype)


def flat(x: Tensor) -> list[float]:
    return [float(value) for value in x.detach().double().reshape(-1)]


def assert_same_steps(ours: Any, theirs: Any, lrs: list[float], rtol: float = 1e-12, atol: float = 1e-14) -> None:
    """Two optimizers of equal parameters, given the same gradients, move them alike."""
    our_parameters, their_parameters = (optimizer.param_groups[0]["params"] for optimizer in (ours, theirs))
    for step, lr in enumerate(lrs):
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] = lr
            give_gradients(optimizer.param_groups[0]["params"], step)
            optimizer.step()
        for our, their in zip(our_parameters, their_parameters, strict=True):
            torch.testing.assert_close(our, their, rtol=rtol, atol=atol)


def assert_follows(optimizer: Any, references: list[Any], lrs: list[float], rel: float = 1e-12) -> None:
    """Each parameter of an optimizer moves as its reference on plain lists, step by step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step, lr in enumerate(lrs):
        for group in optimizer.param_groups:
            group["lr"] = lr
        give_gradients(parameters, step)
        optimizer.step()
        for parameter, reference in zip(parameters, references, strict=True):
            reference.step(flat(parameter.grad), lr)
            assert flat(parameter) == pytest.approx(reference.weights, rel=rel, abs=max(rel, 1e-13))
