"""An attack of a user's own, which only calls the model: the method routes it, and takes back what it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv
from conadv.core.attack import Loss
from support.settings import small_batches, small_cnn

EPSILON = 8 / 255


class OneStep(conadv.Attack):
    """One signed step from the image, as the paper writes it."""

    def __call__(self, model: nn.Module, loss: Loss, images: Tensor, labels: Any, seed: int = 0) -> Tensor:
        leaf = images.clone().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(loss(model(leaf), labels), leaf)
        return (images + EPSILON * gradient.sign()).clamp(0, 1)


def trained(attack: conadv.Attack, delay: int, branch: str) -> dict[str, Tensor]:
    model = conadv.split_batchnorm(small_cnn())
    method = conadv.ConAdv(model, F.cross_entropy, attack, delay=delay, twin_branch=branch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in small_batches(3):
        optimizer.zero_grad()
        method(batch)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("branch", ["main", "adv"])
def test_it_attacks_through_the_branch_of_the_twins_and_leaves_no_trace(branch: str, delay: int) -> None:
    expected = trained(conadv.PGD(EPSILON, random_start=0, branch=branch), delay, branch)
    found = trained(OneStep(), delay, branch)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_recycled_says_what_it_needs() -> None:
    model = conadv.split_batchnorm(small_cnn())
    with pytest.raises(ValueError, match=r"use conadv\.PGD"):
        conadv.Recycled(model, F.cross_entropy, OneStep())
