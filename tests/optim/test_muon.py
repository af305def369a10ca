"""Muon against a reference by singular values, against PyTorch's and AdamW, and at its edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conadv.optim.base import parameter_groups
from conadv.optim.muon import Muon, orthogonalized
from support.optimizers import BOTH_WAYS, MATRICES, assert_same_steps, give_gradients, make_parameters


def by_singular_values(matrix: Tensor) -> Tensor:
    """The same polynomial, five times, of the singular values alone: it keeps the singular vectors."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(6, 6), (3, 40), (40, 3), (1, 5), (5, 1)])
def test_the_update_keeps_the_singular_vectors_and_equalizes_the_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = orthogonalized(matrix)
    torch.testing.assert_close(found, by_singular_values(matrix), rtol=1e-9, atol=1e-11)
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    torch.testing.assert_close(orthogonalized(1e3 * matrix), found, rtol=1e-9, atol=1e-11)
    assert not orthogonalized(torch.zeros(shape)).any()


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_follows_the_reference_step_by_step(momentum: float, decay: float) -> None:
    parameters = make_parameters(shapes=MATRICES)
    weights = [parameter.detach().clone() for parameter in parameters]
    means = [torch.zeros_like(weight) for weight in weights]
    optimizer = Muon(parameters, lr=1.0, momentum=momentum, weight_decay=decay)
    for step, lr in enumerate((0.1, 0.02, 0.0, 0.3)):
        optimizer.param_groups[0]["lr"] = lr
        give_gradients(parameters, step)
        optimizer.step()
        for place, parameter in enumerate(parameters):
            gradient = parameter.grad
            assert gradient is not None
            means[place] = momentum * means[place] + (1 - momentum) * gradient
            ahead = (1 - momentum) * gradient + momentum * means[place]
            rows = len(ahead)
            update = by_singular_values(ahead.reshape(rows, -1)).reshape(ahead.shape)
            size = 0.2 * max(rows, ahead.numel() // rows) ** 0.5
            weights[place] = weights[place] * (1 - lr * decay) - lr * size * update
            torch.testing.assert_close(parameter.detach(), weights[place], rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 or newer has one")
def test_it_agrees_with_that_of_pytorch_up_to_the_rounding_of_bfloat16() -> None:
    shapes = [(16, 8), (8, 16)]
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1}
    ours = Muon(make_parameters(torch.float32, shapes), 0.1, **settings)
    theirs = torch.optim.Muon(make_parameters(torch.float32, shapes), 0.1, **settings, adjust_lr_fn="match_rms_adamw")
    assert_same_steps(ours, theirs, [0.1, 0.02, 0.05], rtol=0, atol=4e-3)  # updates are 0.02 each, root mean square


@BOTH_WAYS
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_adapt_it_is_adamw(foreach: bool, decay: float) -> None:
    settings: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": decay}
    ours = Muon(make_parameters(), 0.1, **settings, adapt=False, foreach=foreach)
    theirs = torch.optim.AdamW(make_parameters(), 0.1, **settings)
    assert_same_steps(ours, theirs, [0.1, 0.02, 0.3, 0.0, 0.1])


def test_the_groups_of_a_network_take_their_own_rules_and_a_vector_among_matrices_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double()
    optimizer = Muon(parameter_groups(model, 0.1), lr=0.1)
    give_gradients(list(model.parameters()), 0)
    optimizer.step()
    kept = [set(optimizer.state[parameter]) for parameter in model.parameters()]
    assert kept == [{"momentum_buffer"}] + [{"step", "exp_avg", "exp_avg_sq"}] * 3
    plain = Muon(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Muon needs matrices: take the groups of"):
        plain.step()
