"""Weights of earlier steps, lent to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conadv import PGD, ConAdv, split_batchnorm
from conadv.core.twins import StaleWeights
from support.settings import small_batches, small_cnn


def test_a_graph_of_the_newest_weights_stays_valid() -> None:
    """A loss that is backpropagated after twins were generated with the stale ones."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    images = torch.randn(2, 3)
    stale = StaleWeights(model, 1)
    with torch.no_grad():
        model[1].weight += 1
    expected = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    loss = model(images).sum()
    with stale.swapped_in(0):
        assert not torch.equal(model(images).sum(), loss)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected, rtol=0, atol=0)


def test_a_state_loads_under_another_wrapper() -> None:
    """A model may be compiled, or distributed, only after it is resumed, or only before."""
    plain = split_batchnorm(small_cnn())
    first = small_batches(1)[0]
    methods = [ConAdv(model, F.cross_entropy, PGD(0.1)) for model in (plain, nn.DataParallel(plain))]
    methods[0](first)
    stored = [method.state_dict() for method in methods]
    assert stored[0].keys() == stored[1].keys()
    for method, state in zip(methods, reversed(stored), strict=True):
        method.load_state_dict(state)
    assert methods[1].step == 1


def test_stale_weights_of_another_model_are_refused_before_anything_is_loaded() -> None:
    stale, other = StaleWeights(nn.Linear(3, 3), 1), StaleWeights(nn.Sequential(nn.Linear(3, 3)), 1)
    with pytest.raises(ValueError, match="lack 'bias': load a state of the same model"):
        stale.load(other.versions)


class Counting(nn.Linear):
    """A layer whose state is not only of tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


def test_the_extra_state_of_a_module_is_no_weight() -> None:
    stale = StaleWeights(Counting(2, 2), 1)
    assert list(stale.versions[0]) == ["weight", "bias"]
    stale.keep()


def test_a_model_that_has_changed_is_refused_and_keeps_its_weights() -> None:
    model = small_cnn(norm=lambda channels: nn.Identity())
    method = ConAdv(model, F.cross_entropy, PGD(8 / 255, random_start=0))
    method(small_batches(1)[0])
    with torch.no_grad():
        model[0].weight.add_(1)
    before = model[0].weight.clone()
    model.add_module("more", nn.Linear(5, 5).double())
    with pytest.raises(ValueError, match="other tensors than when the method was made"):
        method(small_batches(1)[0])
    assert torch.equal(model[0].weight, before)


def test_a_state_before_the_first_step_has_the_weights_of_then() -> None:
    """As after loading pretrained weights into a model whose method was made before."""
    model = small_cnn(norm=lambda channels: nn.Identity())
    method = ConAdv(model, F.cross_entropy, PGD(8 / 255, random_start=0))
    nn.init.normal_(model[0].weight)
    assert torch.equal(method.state_dict()["stale.0.0.weight"], model[0].weight)
