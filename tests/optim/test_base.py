"""What optimizers share: the table, the groups, states that continue, formats that do not matter, misuse by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from conadv.config import Optimizer
from conadv.optim import OPTIMIZERS, build_optimizer
from conadv.optim.base import parameter_groups
from conadv.optim.lamb import Lamb
from conadv.optim.lars import Lars
from conadv.optim.muon import Muon
from support.optimizers import BOTH_WAYS, MATRICES, give_gradients, make_parameters

Make = Callable[..., torch.optim.Optimizer]
EVERY = pytest.mark.parametrize("make", [Lars, Lamb, Muon])

# The class and the settings of each that no field of a recipe names.
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
BUILT = {
    "lars": (Lars, {"momentum": 0.8, "trust_coefficient": 0.001, "eps": 0.0}),
    "sgd": (torch.optim.SGD, {"momentum": 0.8}),
    "adamw": (torch.optim.AdamW, ADAM),
    "lamb": (Lamb, {"betas": (0.9, 0.999), "eps": 1e-6}),
    "muon": (Muon, {"momentum": 0.8, **ADAM}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_is_built_by_its_fields_and_leaves_biases_and_batchnorm_undecayed_and_unadapted(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fields = Optimizer(name=name, lr=0.3, weight_decay=0.2, momentum=0.8)
    optimizer = build_optimizer(model, asdict(fields))
    kind, settings = BUILT[name]
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [group["adapt"] for group in optimizer.param_groups] == [True, False]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    assert all({"lr": 0.3, **settings}.items() <= group.items() for group in optimizer.param_groups)


class Branched(nn.BatchNorm2d):
    """A layer whose other branch lives below it, as a split BatchNorm's does."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.adv = nn.BatchNorm2d(features)


def test_groups_leave_out_biases_and_normalization() -> None:
    layers = {
        "conv": nn.Conv2d(3, 4, 3),
        "bn": Branched(4),
        "group": nn.GroupNorm(2, 4),
        "layer": nn.LayerNorm([4, 6, 6]),
        "rms": nn.RMSNorm([4, 6]),
        "instance": nn.InstanceNorm2d(4, affine=True),
        "rnn": nn.LSTM(4, 4),
        "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
        "fc": nn.Linear(4, 2),
    }
    model = nn.ModuleDict(layers)
    names = {parameter: name for name, parameter in model.named_parameters()}
    adapted, plain = parameter_groups(model, 0.25)
    expected = (
        "conv.weight rnn.weight_ih_l0 rnn.weight_hh_l0 attention.in_proj_weight attention.out_proj.weight fc.weight"
    )
    assert {names[parameter] for parameter in adapted["params"]} == set(expected.split())
    assert {"bn.adv.weight", "bn.adv.bias", "bn.weight"} < {names[parameter] for parameter in plain["params"]}
    assert len(adapted["params"]) + len(plain["params"]) == len(names)


def test_groups_hold_a_shared_parameter_once_and_a_frozen_one_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    model[2].bias = model[0].bias
    adapted, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in adapted["params"]] == [id(model[0].weight)]
    assert [id(p) for p in plain["params"]] == [id(model[0].bias), id(model[1].bias)]
    with pytest.raises(ValueError, match="no parameter to train"):
        parameter_groups(model.requires_grad_(False), 0.1)


@EVERY
@BOTH_WAYS
def test_gradients_are_not_written_to_and_a_parameter_without_one_is_left_alone(make: Make, foreach: bool) -> None:
    parameters = make_parameters(shapes=MATRICES)
    optimizer = make(parameters, lr=0.1, weight_decay=0.1, foreach=foreach)
    for step in range(2):
        before = copy.deepcopy(parameters)
        give_gradients(parameters, step)
        parameters[1].grad = None
        held = [parameter.grad for parameter in parameters]
        gradients = copy.deepcopy(held)
        optimizer.step()
        assert [torch.equal(p, old) for p, old in zip(parameters, before, strict=True)] == [False, True, False]
        for parameter, gradient, own in zip(parameters, gradients, held, strict=True):
            assert parameter.grad is own
            assert own is None if gradient is None else torch.equal(own, gradient)
    assert parameters[1] not in optimizer.state


@EVERY
@BOTH_WAYS
@pytest.mark.parametrize("adapt", [True, False])
def test_it_continues_bitwise_from_its_state(make: Make, foreach: bool, adapt: bool) -> None:
    parameters = make_parameters(torch.float32, MATRICES)
    optimizer = make(parameters, lr=0.5, weight_decay=0.01, adapt=adapt, foreach=foreach)
    for step in range(3):
        give_gradients(parameters, step)
        optimizer.step()
    resumed = copy.deepcopy(parameters)
    resumed_optimizer = make(resumed, lr=9.0)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for own, other in ((parameters, optimizer), (resumed, resumed_optimizer)):
            other.param_groups[0]["lr"] = 1 / step
            give_gradients(own, step)
            other.step()
    assert all(torch.equal(one, two) for one, two in zip(parameters, resumed, strict=True))


@EVERY
@BOTH_WAYS
def test_dtypes_may_be_mixed_in_a_group(make: Make, foreach: bool) -> None:
    mixed = [*make_parameters(torch.float32, MATRICES)[:2], *make_parameters(torch.float64, MATRICES)[:2]]
    apart = copy.deepcopy(mixed)
    for parameters in (mixed, apart):
        give_gradients(parameters, 1)
    make(mixed, lr=1.0, foreach=foreach).step()
    for parameter in apart:
        make([parameter], lr=1.0, foreach=foreach).step()
    assert all(torch.equal(together, alone) for together, alone in zip(mixed, apart, strict=True))


@EVERY
@BOTH_WAYS
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_of_weights_and_gradients_does_not_matter(
    make: Make, foreach: bool, memory_format: torch.memory_format
) -> None:
    plain, other = (make_parameters(shapes=[(4, 3, 5, 5)]) for _ in range(2))
    other[0].data = other[0].data.to(memory_format=torch.channels_last)
    for parameters in (plain, other):
        optimizer = make(parameters, lr=1.0, weight_decay=0.1, foreach=foreach)
        for step in range(3):
            give_gradients(parameters, step)
            assert parameters[0].grad is not None
            if parameters is other:
                parameters[0].grad = parameters[0].grad.to(memory_format=memory_format)
            optimizer.step()
    assert other[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain[0], other[0], rtol=1e-12, atol=1e-12)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "settings"), [(Lars, {"lr": 1.0, "trust_coefficient": 0.5}), (Lamb, {"lr": 0.5, "betas": (0.0, 0.0)})]
)
def test_norms_of_many_short_numbers_neither_overflow_nor_stall(
    make: Make, settings: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    """100,000 times 300 squared is far above the largest float16, and a bfloat16 sum of ones stalls at 256."""
    weight = nn.Parameter(torch.full((1000, 100), 300.0, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    make([weight], **settings, foreach=foreach).step()  # the update is half of the norm of the weights, 300 each
    assert weight[0, 0].item() == weight[-1, -1].item() == 150.0


@EVERY
def test_together_never_asks_for_a_value(make: Make) -> None:
    """On the meta device there are no values: whatever would wait for a device raises an error there."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in MATRICES]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    for adapt in (True, False):
        make(parameters, lr=1.0, weight_decay=0.1, adapt=adapt).step()  # together is the default but on the CPU
    with pytest.raises(RuntimeError, match="meta"):
        Lars(parameters, lr=1.0, foreach=False).step()  # the check checks


@EVERY
def test_it_returns_the_loss_of_a_closure_that_needs_gradients(make: Make) -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = make([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 25.0
    assert weight.norm().item() < 5
    assert optimizer.step() is None


def test_a_sparse_gradient_is_an_error() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        Lars(table.parameters(), lr=1.0).step()


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (Lars, {"lr": -1.0}, "lr -1.0: take"),
        (Lamb, {"lr": math.nan}, "lr nan: take"),
        (Muon, {"lr": math.inf}, "lr inf: take"),
        (Lars, {"lr": "10"}, "lr '10': take"),
        (Lamb, {"weight_decay": -1e-4}, "weight_decay -0.0001: take"),
        (Lars, {"momentum": 1.0}, "momentum 1.0"),
        (Muon, {"momentum": -0.1}, "momentum -0.1"),
        (Lars, {"trust_coefficient": 0.0}, "trust_coefficient 0"),
        (Lars, {"eps": -1.0}, "eps -1.0"),
        (Lamb, {"eps": 0.0}, "eps 0 divides by 0"),
        (Muon, {"betas": (0.9, 1.0)}, "take two numbers from 0 to below 1"),
        (Lamb, {"betas": (0.9,)}, "take two numbers from 0 to below 1"),
    ],
)
def test_bad_values_are_named_for_all_and_for_a_group(make: Make, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_parameters(), **{"lr": 1.0, **wrong})
    with pytest.raises(ValueError, match=message):
        make([{"params": make_parameters(), **wrong}], lr=1.0)
