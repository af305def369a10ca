"""Gradients scaled by their signal-to-noise ratio: against one computed apart, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv
from conadv.optim.signal import SignalToNoise
from conadv.trainer.build import check_fit
from support import tiny
from support.settings import small_batches, small_cnn

CHUNK = 4


def ratio(gradients: list[Tensor], floor: float) -> Tensor:
    """The factor of a gradient, from the gradients of the chunks, as the paper writes it."""
    each = np.stack([gradient.numpy() for gradient in gradients])
    signal, noise = each.mean(0) ** 2, each.var(0)
    found = np.divide(signal, noise, out=np.zeros_like(noise), where=noise > 0)  # 0 for what no chunk has a gradient of
    return torch.from_numpy(np.clip(found / found.mean(), floor, 1.0))


@pytest.mark.parametrize("floor", [0.1, 0.5])
def test_the_gradient_is_scaled_by_the_ratio_over_the_chunks_computed_apart(floor: float) -> None:
    model = conadv.split_batchnorm(small_cnn(), ("main",))
    signal = SignalToNoise(model.parameters(), floor)
    method = conadv.Vanilla(model, F.cross_entropy, chunk_size=CHUNK, after_chunk=signal.add)
    for images, labels in small_batches(2, size=4 * CHUNK):  # the weights stay as they are: there is no optimizer
        model.zero_grad()
        signal.begin()
        method((images, labels))
        signal.scale()
    apart, chunks = small_cnn(), []
    for own, right in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
        chunks.append(torch.autograd.grad(F.cross_entropy(apart(own), right), list(apart.parameters())))
    for parameter, gradients in zip(model.parameters(), zip(*chunks, strict=True), strict=True):
        mean = torch.stack(gradients).mean(0)
        if float(mean.abs().max()) > 1e-12:  # BatchNorm takes the gradient of a bias before it away
            torch.testing.assert_close(parameter.grad, mean * ratio(list(gradients), floor), rtol=1e-8, atol=1e-12)


def test_a_weight_without_gradient_or_noise_keeps_its_gradient_finite() -> None:
    weight, same, unused = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    signal = SignalToNoise([weight, same, unused])
    signal.begin()
    for step in range(3):
        loss = (torch.tensor([0.0, 1.0, step]) * weight).sum() / 3 + same.sum() / 3
        loss.backward()
        signal.add()
    signal.scale()
    assert unused.grad is None
    assert same.grad is not None and same.grad.tolist() == pytest.approx([1.0, 1.0, 1.0])  # all alike
    assert weight.grad is not None and weight.grad.tolist() == pytest.approx([0.0, 1.0, 0.1])  # none, certain, noisy


def test_what_cannot_be_is_refused() -> None:
    for floor in (0, 1.5):
        with pytest.raises(ValueError, match=f"floor {floor}: the smallest factor"):
            SignalToNoise([], floor)
    signal = SignalToNoise(small_cnn().parameters())
    signal.begin()
    signal.add()
    with pytest.raises(ValueError, match=r"1 chunks in this step: .* two or more"):
        signal.scale()
    check_fit(tiny.recipe(optimizer__gsnr=0.1), 1)
    alone = {"batch_size": 8, "chunk_size": 8}
    for size, changes in ((2, {}), (1, {"shuffle_twins": 2}), (1, {"twin_share": 0.5}), (1, alone)):
        with pytest.raises(ValueError, match=r"optimizer\.gsnr compares the chunks of one process"):
            check_fit(tiny.recipe(optimizer__gsnr=0.1, **changes), size)
