"""The state of a run as tensors, and back, in the same bits and the same layout of memory."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conadv.core.splitbn import split_batchnorm
from conadv.core.twins import StaleWeights
from conadv.optim import OPTIMIZERS, build_optimizer
from conadv.trainer.checkpoint import Checkpoint, check_tensors, gather, restore, stale_versions

SETTINGS = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}


class Odd(Optimizer):
    """An optimizer that remembers all kinds of things: rows of a matrix, Python numbers, None, a short dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                rows = torch.zeros(parameter.shape[:1], dtype=torch.float64)
                state.update(rows=rows, count=0, mean=0.0, warm=False, extra=None, half=parameter.half())
            state["count"] += 1
            state["mean"] += float(parameter.grad.mean()) / 3
            state["warm"] = state["count"] > 1
            state["rows"] += parameter.grad.flatten(1).sum(1) if parameter.ndim > 1 else parameter.grad
            state["half"].add_(parameter.grad)
            parameter.sub_(state["mean"] * parameter.grad)


EVERY = [*OPTIMIZERS, "odd"]


def make(seed: int = 0, name: str = "lars") -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = split_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), ("main", "adv"))
    model = model.to(memory_format=torch.channels_last)
    return model, Odd(model.parameters()) if name == "odd" else build_optimizer(model, {"name": name, **SETTINGS})


def check(tensors: dict[str, Tensor], delay: int) -> None:
    check_tensors(tensors, make(seed=7)[0], delay)


def take_step(model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    stale.keep()
    optimizer.step()


def trained(steps: int, delay: int, name: str = "lars") -> tuple[nn.Module, Optimizer, StaleWeights]:
    model, optimizer = make(name=name)
    stale = StaleWeights(model, delay)
    for _ in range(steps):
        take_step(model, optimizer, stale)
    return model, optimizer, stale


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_everything_comes_back_as_it_was(name, delay):
    run = trained(4, delay, name)
    gathered = gather(*run)
    # As a file has it, so that nothing comes back that was not written.
    tensors = safetensors.torch.load(safetensors.torch.save(gathered.tensors))
    check(tensors, delay)
    model, optimizer = make(seed=1, name=name)
    other = (model, optimizer, StaleWeights(model, delay))
    restore(Checkpoint(tensors, json.loads(json.dumps(gathered.about))), model, optimizer)
    other[2].load(stale_versions(tensors))
    for mine, theirs in zip(run[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert_same_state(run[1].state[mine], optimizer.state[theirs])
    for _ in range(2):
        after = [gather(*run).tensors, gather(*other).tensors]
        assert after[0].keys() == after[1].keys()
        assert all(torch.equal(after[0][key], after[1][key]) for key in after[0])
        for trainee in (run, other):
            torch.manual_seed(9)
            take_step(*trainee)
    assert all(torch.equal(gathered.tensors[key], tensors[key]) for key in tensors)  # it is a copy


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert type(value) is type(other[key]), key
        if isinstance(value, Tensor):
            assert torch.equal(value, other[key]), key
            assert (value.dtype, value.stride()) == (other[key].dtype, other[key].stride()), key
        else:
            assert value == other[key], key


@pytest.mark.parametrize("name", EVERY)
def test_a_parameter_that_has_had_no_gradient_starts_afresh(name):
    model, optimizer = make(name=name)
    stale = StaleWeights(model, 0)
    torch.manual_seed(3)
    model[0].weight.grad = torch.rand_like(model[0].weight)
    optimizer.step()
    state = gather(model, optimizer, stale)
    assert {key.partition(":")[0] for key in state.tensors if key.startswith("optimizer.")} == {"optimizer.0.weight"}
    check(state.tensors, 0)
    other, other_optimizer = make(seed=1, name=name)
    restore(state, other, other_optimizer)
    assert [parameter for parameter, state in other_optimizer.state.items() if state] == [other[0].weight]


def test_what_no_file_can_hold_is_refused():
    run = trained(1, 0)
    run[1].state[run[0][0].weight]["names"] = ["a"]
    with pytest.raises(TypeError, match="tensors, numbers and None of an optimizer, not list"):
        gather(*run)


@pytest.mark.parametrize("delay", [1, 3])
def test_the_model_is_lent_stale_weights_and_gets_its_own_back(delay):
    model, optimizer = make()
    model.add_module("again", model[0])  # a weight under two names
    stale = StaleWeights(model, delay)
    before = [copy.deepcopy(model.state_dict()) for _ in range(delay)]
    for _ in range(4):
        before.append(copy.deepcopy(model.state_dict()))
        take_step(model, optimizer, stale)
    now, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(stale.versions)
    for _ in range(2):
        with stale.swapped_in(0):
            then = copy.deepcopy(model.state_dict())
        pairs = [(then, before[-delay]), (model.state_dict(), now), *zip(stale.versions, kept, strict=True)]
        for found, expected in pairs:
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert all(found[name].stride() == expected[name].stride() for name in expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


FOUR = torch.zeros(4)
CHANGES: dict[str, dict[str, Tensor | None]] = {
    "a stale version too many": {"stale.2.0.weight": FOUR},
    "a tensor too many": {"other": FOUR},
    "another shape": {"model.0.bias": torch.zeros(5)},
    "another type": {"model.0.bias": FOUR.double()},
    "a tensor less": {"model.0.weight": None},
    "a stale tensor less": {"stale.1.0.weight": None},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_of_another_model_is_refused(change):
    changed = {**gather(*trained(2, 2)).tensors, **change}
    with pytest.raises(ValueError, match="is of another model: tensor"):
        check({name: tensor for name, tensor in changed.items() if tensor is not None}, 2)
