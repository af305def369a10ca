"""Gradient accumulation: `delay` counts updates of the weights, however many calls there are between two of them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv
from support.settings import small_batches, small_cnn

EPSILON, RATE = 8 / 255, 0.2
Batch = tuple[Tensor, Tensor]
ATTACK = PGD(EPSILON, random_start=0)


def bare_model() -> nn.Sequential:
    """Without BatchNorm, so that one ordinary model is the whole reference."""
    return small_cnn(norm=lambda channels: nn.Identity())


def by_hand(groups: list[list[Batch]], delay: int) -> nn.Module:
    """The definition: all batches of an update get twins of the weights of `delay` updates ago."""
    model = bare_model()
    history: list[nn.Module] = []
    for group in groups:
        history.append(copy.deepcopy(model))
        old = history[max(len(history) - 1 - delay, 0)]
        model.zero_grad()
        for images, labels in group:
            leaf = images.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(old(leaf), labels), leaf)
            twins = (images + EPSILON * gradient.sign()).clamp(0, 1)
            loss = (F.cross_entropy(model(images), labels) + F.cross_entropy(model(twins), labels)) / 2
            (loss / len(group)).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= RATE * weight.grad
    return model


def update(model: nn.Module, through_data: bool) -> None:
    """A step of SGD; some optimizers write to `.data`, which PyTorch does not count as a change."""
    with torch.no_grad():
        for weight in model.parameters():
            (weight.data if through_data else weight).sub_(RATE * weight.grad)
    model.zero_grad()


def train(method: ConAdv, model: nn.Module, groups: list[list[Batch]], through_data: bool = False) -> None:
    for group in groups:
        for batch in group:
            (method.loss(batch) / len(group)).backward()
        update(model, through_data)


def grouped(sizes: list[int]) -> list[list[Batch]]:
    batches = iter(small_batches(sum(sizes)))
    return [list(itertools.islice(batches, size)) for size in sizes]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2, 2, 1], [3, 1, 2, 3]], ids=str)
def test_all_batches_of_an_update_get_twins_of_the_same_weights(
    sizes: list[int], delay: int, through_data: bool
) -> None:
    model = bare_model()
    train(ConAdv(model, F.cross_entropy, ATTACK, delay=delay), model, grouped(sizes), through_data)
    assert_same(model, by_hand(grouped(sizes), delay))


def test_the_weights_at_the_start_are_those_of_the_first_step() -> None:
    """Weights may be loaded after the method was made."""
    model = bare_model()
    loaded = copy.deepcopy(model.state_dict())
    nn.init.normal_(model[0].weight)
    method = ConAdv(model, F.cross_entropy, ATTACK)
    model.load_state_dict(loaded)
    train(method, model, grouped([1, 1, 1]))
    assert_same(model, by_hand(grouped([1, 1, 1]), delay=1))


@pytest.mark.parametrize("stop", range(1, 8))
def test_stopped_between_any_two_batches(stop: int) -> None:
    """The state says whether the weights were updated since the last batch; gradients are the caller's to keep."""
    (model, method), batches = fresh(), small_batches(8)
    for number, batch in enumerate(batches):
        if number == stop:
            model, method = resumed(model, method)
        (method.loss(batch) / 2).backward()
        if number % 2:
            update(model, through_data=False)
    assert_same(model, by_hand([batches[start : start + 2] for start in range(0, 8, 2)], delay=2))


def test_a_method_that_accumulated_loads_a_state_from_before() -> None:
    """It keeps one more version of the weights than that state has."""
    (model, method), groups = fresh(), grouped([1, 2, 2])
    start = copy.deepcopy(model.state_dict()), method.state_dict()
    for _ in range(2):
        model.load_state_dict(start[0])
        method.load_state_dict(start[1])
        train(method, model, groups)
    assert_same(model, by_hand(groups, delay=2))


def fresh() -> tuple[nn.Module, ConAdv]:
    model = bare_model()
    return model, ConAdv(model, F.cross_entropy, ATTACK, delay=2)


def resumed(model: nn.Module, method: ConAdv) -> tuple[nn.Module, ConAdv]:
    other, own = fresh()
    own.load_state_dict(method.state_dict())
    other.load_state_dict(model.state_dict())
    for weight, before in zip(other.parameters(), model.parameters(), strict=True):
        weight.grad = before.grad
    return other, own
