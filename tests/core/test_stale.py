"""Weights of earlier steps, lent to a model."""

from __future__ import annotations

import torch
from torch import nn

from conadv.core.stale import StaleWeights


def test_a_graph_of_the_newest_weights_stays_valid() -> None:
    """A loss that is backpropagated after twins were generated with the stale ones."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    images = torch.randn(2, 3)
    stale = StaleWeights(model, 1)
    with torch.no_grad():
        model[1].weight += 1
    expected = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    loss = model(images).sum()
    with stale.swapped_in():
        assert not torch.equal(model(images).sum(), loss)
    for found, gradient in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert torch.equal(found, gradient)
