"""What LARS, LAMB and Muon have in common: gradients stay, states continue, formats do not matter, misuse is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conadv.optim.lamb import Lamb
from conadv.optim.lars import Lars
from conadv.optim.muon import Muon
from support.optimizers import BOTH_WAYS, MATRICES, give_gradients, make_parameters

Make = Callable[..., torch.optim.Optimizer]
EVERY = pytest.mark.parametrize("make", [Lars, Lamb, Muon])


@EVERY
@BOTH_WAYS
def test_gradients_are_not_written_to_and_a_parameter_without_one_is_left_alone(make: Make, foreach: bool) -> None:
    parameters = make_parameters(shapes=MATRICES)
    optimizer = make(parameters, lr=0.1, weight_decay=0.1, foreach=foreach)
    for step in range(2):
        before = copy.deepcopy(parameters)
        give_gradients(parameters, step)
        parameters[1].grad = None
        gradients = [copy.deepcopy(parameter.grad) for parameter in parameters]
        held = [parameter.grad for parameter in parameters]
        optimizer.step()
        assert [torch.equal(p, old) for p, old in zip(parameters, before, strict=True)] == [False, True, False]
        for parameter, gradient, own in zip(parameters, gradients, held, strict=True):
            assert parameter.grad is own
            assert own is None if gradient is None else torch.equal(own, gradient)
    assert parameters[1] not in optimizer.state
    before = copy.deepcopy(parameters)
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


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


@EVERY
def test_together_never_asks_for_a_value(make: Make) -> None:
    """On the meta device tensors have no values: whatever would wait for a device raises an error there."""
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in MATRICES]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    for adapt in (True, False):
        make(parameters, lr=1.0, weight_decay=0.1, adapt=adapt, foreach=True).step()
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


@EVERY
def test_a_sparse_gradient_is_an_error(make: Make) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense"):
        make(table.parameters(), lr=1.0).step()


ADAM = [
    ({"eps": 0.0}, "eps 0 divides by 0"),
    ({"betas": (0.9, 1.0)}, "take two numbers from 0 to below 1"),
    ({"betas": (0.9,)}, "take two numbers from 0 to below 1"),
]
MOMENTUM = [({"momentum": 1.0}, "momentum 1.0"), ({"momentum": -0.1}, "momentum -0.1")]
WRONG = {
    Lars: [*MOMENTUM, ({"trust_coefficient": 0.0}, "trust_coefficient 0"), ({"eps": -1.0}, "eps -1.0")],
    Lamb: ADAM,
    Muon: [*MOMENTUM, *ADAM],
}
NUMBERS = [
    ({"lr": -1.0}, "lr -1.0: take"),
    ({"lr": math.nan}, "lr nan: take"),
    ({"lr": math.inf}, "lr inf: take"),
    ({"lr": "10"}, "lr '10': take"),
    ({"weight_decay": -1e-4}, "weight_decay -0.0001: take"),
]


@pytest.mark.parametrize(
    ("make", "wrong", "message"), [(make, *case) for make, own in WRONG.items() for case in [*NUMBERS, *own]]
)
def test_bad_values_are_named_for_all_and_for_a_group(make: Make, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_parameters(), **{"lr": 1.0, **wrong})
    with pytest.raises(ValueError, match=message):
        make([{"params": make_parameters(), **wrong}], lr=1.0)
