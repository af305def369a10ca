"""SAM in a user's loop: models that are not split, weights that are frozen for a while, lengths that are none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import Sam
from support.settings import small_batches, small_cnn


def sam_gradients(model: nn.Module, batch: tuple[Tensor, Tensor], rho: float) -> list[Tensor]:
    """The gradients of SAM, written apart; the running statistics are those of the first pass."""
    weights = list(model.parameters())
    first = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), weights)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    length = math.sqrt(sum(float(gradient.square().sum()) for gradient in first))
    with torch.no_grad():
        for weight, gradient in zip(weights, first, strict=True):
            weight += rho * gradient / length
    second = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, first, strict=True):
            weight -= rho * gradient / length
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return list(second)


def test_a_model_that_is_not_split_keeps_the_statistics_of_its_first_pass() -> None:
    images, labels = small_batches(1)[0]
    batch = images.double(), labels
    model, plain = small_cnn().double(), small_cnn().double()
    Sam(model, F.cross_entropy, rho=0.5)(batch)
    expected = sam_gradients(plain, batch, 0.5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rho", [0, -1, math.inf, math.nan])
def test_a_length_above_0_is_needed(rho: float) -> None:
    with pytest.raises(ValueError, match="a length above 0, such as"):
        Sam(small_cnn(), F.cross_entropy, rho=rho)
