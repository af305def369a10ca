"""The state of a run as tensors, and back, in the same bits and the same layout of memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from conadv.core.splitbn import split_batchnorm
from conadv.core.stale import StaleWeights
from conadv.optim.lars import Lars, parameter_groups
from conadv.train.state import check_tensors, gather, largest_size, restore, stale_versions


def make(seed: int = 0) -> tuple[nn.Module, Lars]:
    torch.manual_seed(seed)
    model = split_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), ("main", "adv"))
    model = model.to(memory_format=torch.channels_last)
    return model, Lars(parameter_groups(model, 0.1), lr=1.0)


def take_step(model: nn.Module, optimizer: Lars, stale: StaleWeights) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    stale.keep()
    optimizer.step()


def trained(steps: int, delay: int) -> tuple[nn.Module, Lars, StaleWeights]:
    model, optimizer = make()
    stale = StaleWeights(model, delay)
    for _ in range(steps):
        take_step(model, optimizer, stale)
    return model, optimizer, stale


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_everything_comes_back_as_it_was(delay):
    model, optimizer, stale = trained(4, delay)
    tensors = gather(model, optimizer, stale)
    check_tensors(tensors, model, delay)
    other, other_optimizer = make(seed=1)
    other_stale = StaleWeights(other, delay)
    restore(tensors, other, other_optimizer, other_stale)
    again = gather(other, other_optimizer, other_stale)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        momentum = optimizer.state[mine]["momentum_buffer"], other_optimizer.state[theirs]["momentum_buffer"]
        assert momentum[0].stride() == momentum[1].stride()


def test_a_gathered_state_does_not_move_with_the_training():
    model, optimizer, stale = trained(2, 1)
    tensors = gather(model, optimizer, stale)
    before = copy.deepcopy(tensors)
    take_step(model, optimizer, stale)
    assert all(torch.equal(before[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_stale_weights_are_those_before_each_of_the_last_updates(steps):
    model, optimizer = make()
    stale = StaleWeights(model, 2)
    before = [copy.deepcopy(model.state_dict())] * 2
    for _ in range(steps):
        before.append(copy.deepcopy(model.state_dict()))
        take_step(model, optimizer, stale)
    kept = stale_versions(gather(model, optimizer, stale))
    assert len(kept) == 2
    for version, expected in zip(kept, before[-2:], strict=True):
        assert version.keys() == expected.keys()
        assert all(torch.equal(version[name], expected[name]) for name in expected)


@pytest.mark.parametrize("delay", [1, 3])
def test_the_model_is_lent_the_weights_of_then_and_gets_its_own_back(delay):
    model, optimizer = make()
    model.add_module("again", model[0])  # a weight under two names
    stale = StaleWeights(model, delay)
    before = [copy.deepcopy(model.state_dict()) for _ in range(delay)]
    for _ in range(4):
        before.append(copy.deepcopy(model.state_dict()))
        take_step(model, optimizer, stale)
    now, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(stale.versions())
    for _ in range(2):
        with stale.swapped_in():
            then = copy.deepcopy(model.state_dict())
        for found, expected in ((then, before[-delay]), (model.state_dict(), now)):
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert all(found[name].stride() == expected[name].stride() for name in expected)
    for version, expected in zip(stale.versions(), kept, strict=True):
        assert all(torch.equal(version[name], expected[name]) for name in expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_before_the_first_update_there_is_nothing_of_the_optimizer():
    model, optimizer, stale = trained(0, 1)
    tensors = gather(model, optimizer, stale)
    assert not any(name.startswith("optimizer.") for name in tensors)
    check_tensors(tensors, model, 1)


CHANGES = {
    "a tensor is missing": lambda tensors: tensors.pop("model.0.weight"),
    "a stale tensor is missing": lambda tensors: tensors.pop("stale.1.0.weight"),
    "stale weights of one step too many": lambda tensors: tensors.update({"stale.2.0.weight": torch.zeros(1)}),
    "a tensor too many": lambda tensors: tensors.update(other=torch.zeros(1)),
    "another shape": lambda tensors: tensors.update({"model.0.bias": torch.zeros(5)}),
    "another type": lambda tensors: tensors.update({"model.0.bias": torch.zeros(4, dtype=torch.float64)}),
    "an optimizer of another shape": lambda tensors: tensors.update({"optimizer.0.bias:x": torch.zeros(5)}),
    "an optimizer of another model": lambda tensors: tensors.update({"optimizer.9.bias:x": torch.zeros(4)}),
    "an optimizer of a buffer": lambda tensors: tensors.update({"optimizer.1.running_mean:x": torch.zeros(4)}),
    "an optimizer of nothing": lambda tensors: tensors.update({"optimizer.0.bias": torch.zeros(4)}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_of_another_model_is_refused(change):
    model, optimizer, stale = trained(2, 2)
    tensors = gather(model, optimizer, stale)
    check_tensors(tensors, model, 2)
    change(tensors)
    with pytest.raises(ValueError, match="is of another model: tensor"):
        check_tensors(tensors, model, 2)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_file_of_the_state_is_not_larger_than_the_largest(delay):
    import safetensors.torch

    model, optimizer, stale = trained(2, delay)
    size = len(safetensors.torch.save(gather(model, optimizer, stale)))
    assert size <= largest_size(model, delay) <= 20 * size + 2**17
