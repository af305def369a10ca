"""The scripts of studies/theory against dense oracles and by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev

from conadv import split_batchnorm
from sharpness import Hessian
from small_task import gradient, network
from staleness import measure


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(12, 1, 8, 8, generator=generator), torch.randint(3, (12,), generator=generator)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 2, 5, bias=False), torch.nn.BatchNorm2d(2), torch.nn.Tanh(), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 3)).double()
    model(3 * torch.rand(9, 1, 8, 8, dtype=torch.float64) - 1)
    return model


def test_the_hessian_is_the_dense_one(batch):
    images, labels = batch[0].double(), batch[1]
    plain = small().eval()
    weights = {name: own.detach() for name, own in plain.named_parameters()}
    sizes = [own.numel() for own in weights.values()]

    def loss(vector):
        parts = zip(weights.items(), vector.split(sizes), strict=True)
        return F.cross_entropy(functional_call(plain, {n: v.view_as(w) for (n, w), v in parts}, images), labels)

    dense = jacrev(grad(loss))(torch.cat([own.flatten() for own in weights.values()])).numpy()
    hessian = Hessian(split_batchnorm(small()), "main", (images, labels))
    assert hessian.size == len(dense), "the weights of the other branch are left out"
    vector = np.random.default_rng(0).normal(size=hessian.size)
    np.testing.assert_allclose(hessian.times(vector), dense @ vector, atol=1e-10)
    np.testing.assert_allclose(hessian.largest(3), np.linalg.eigvalsh(dense)[:-4:-1], rtol=1e-2)
    assert hessian.trace(probes=400) == pytest.approx(np.trace(dense), rel=0.15)


def test_staleness_by_hand(batch):
    torch.manual_seed(0)
    model, old = network(1, 3), network(1, 3)
    before = copy.deepcopy(model.state_dict())
    found = measure(model, old, batch, epsilon=0.0)  # twins are the images
    now, then = ([own.detach() for own in one.parameters()] for one in (model, old))
    assert found["weight_drift"] == pytest.approx(
        sum(float((a - b).square().sum()) for a, b in zip(now, then, strict=True)) ** 0.5, rel=1e-5
    )
    assert found["stale_distance"] == found["gradient_error"] == 0
    # With new branches that are copies of each other, both halves of the loss are the loss itself.
    assert found["fresh_loss"] == pytest.approx(gradient(model, "main", *batch)[0], rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), (
        "measuring leaves no trace"
    )
