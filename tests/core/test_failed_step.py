"""One rule for a step that raises: the method is unusable until its state is loaded or a new epoch begins.

After that, the step that failed has left no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv

IMAGES, LABELS = torch.rand(2, 8, 3, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
ATTACK = conadv.PGD(8 / 255)


class Fragile(nn.Module):
    """Fails once, after as many passes as `left` says."""

    left = -1

    def forward(self, images: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return images


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Fragile(), nn.Flatten(), nn.Linear(64, 4)
    model = conadv.split_batchnorm(nn.Sequential(*layers).double())
    assert isinstance(model, nn.Sequential)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = {f"{name}.grad": own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    return {**found, **grads}


def take_step(method: Any, model: nn.Module, number: int, rate: float = 0.1) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    losses = method((IMAGES[number].double(), LABELS))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    return losses.clean, losses.adv


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "vanilla": lambda model: conadv.Vanilla(model, F.cross_entropy, chunk_size=4, seed=1),
    "disadv": lambda model: conadv.ConAdv(model, F.cross_entropy, ATTACK, delay=0, chunk_size=4, seed=1),
    "conadv": lambda model: conadv.ConAdv(model, F.cross_entropy, ATTACK, chunk_size=4, seed=1),
    "recycled": lambda model: conadv.Recycled(model, F.cross_entropy, ATTACK, chunk_size=4, seed=1),
    "sam": lambda model: conadv.Sam(model, F.cross_entropy, chunk_size=4, seed=1),
}


failing = pytest.mark.parametrize(
    ("name", "passes"), [(name, passes) for name in METHODS for passes in range(1, 3 if name == "vanilla" else 5)]
)


def fail(method: Any, model: Any, passes: int) -> None:
    """Take a step that raises after some passes."""
    model[2].left = passes
    with pytest.raises(RuntimeError, match="out of memory"):
        take_step(method, model, 1)
    model[2].left = -1


@failing
def test_nothing_but_a_new_epoch_or_a_state_makes_it_usable_again(name: str, passes: int) -> None:
    model = network()
    method = METHODS[name](model)
    take_step(method, model, 0)
    fail(method, model, passes)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="the step before failed in the middle: clear the gradients, and load a state"
        ):
            take_step(method, model, 1)
    assert method.step == 1


@failing
@pytest.mark.parametrize("way", ["epoch", "state"])
def test_the_step_after_it_is_that_of_a_loop_without_it(name: str, passes: int, way: str) -> None:
    begun = 0 if way == "epoch" and name == "recycled" else 1  # what was carried over is dropped there
    ends = []
    for fails in (False, True):
        model = network()
        method = METHODS[name](model)
        if begun:
            take_step(method, model, 0)
        state = method.state_dict()
        if fails:
            fail(method, model, passes)
            if way == "state":
                method.load_state_dict(state)
            else:
                next(iter(method.feed([0])))
        losses = take_step(method, model, 1)
        ends.append({**state_of(model), "clean": losses[0], "adv": losses[1]})
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_a_batch_that_is_refused_before_it_is_learnt_from_is_no_failed_step() -> None:
    model = network()
    method = METHODS["conadv"](model)
    with pytest.raises(ValueError, match="not a whole number of chunks"):
        method((IMAGES[0][:6].double(), LABELS[:6]))
    take_step(method, model, 0)


def test_a_loss_that_was_never_backpropagated_is_a_failed_step_of_recycled() -> None:
    model = network()
    method = METHODS["recycled"](model)
    method.loss((IMAGES[0].double(), LABELS))  # its backward pass failed
    with pytest.raises(ValueError, match="backpropagate"):
        take_step(method, model, 1)
    next(iter(method.feed([0])))
    take_step(method, model, 1)
