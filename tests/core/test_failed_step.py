"""A step that fails in the middle, as when the device is out of memory, must not change the steps after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv
from conadv.core.handoff import Queue

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
    "stale sam": lambda model: conadv.Sam(model, F.cross_entropy, delay=1, chunk_size=4, seed=1),
}


@pytest.mark.parametrize(
    ("name", "passes"), [(name, passes) for name in METHODS for passes in range(1, 3 if name == "vanilla" else 5)]
)
def test_the_step_after_a_failed_one_is_that_of_a_loop_without_it(name: str, passes: int) -> None:
    begun = 0 if name in ("recycled", "stale sam") else 1  # these begin again, with twins or directions of the batch
    ends = []
    for fails in (False, True):
        model = network()
        method = METHODS[name](model)
        if begun:
            take_step(method, model, 0)
        if fails:
            model[2].left = passes
            with pytest.raises(RuntimeError, match="out of memory"):
                take_step(method, model, 1)
            model[2].left = -1
        losses = take_step(method, model, 1)
        ends.append({**state_of(model), "clean": losses[0], "adv": losses[1]})
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_recycled_goes_on_after_a_failed_step_in_the_middle() -> None:
    model = network()
    method = METHODS["recycled"](model)
    take_step(method, model, 0)
    model[2].left = 3
    with pytest.raises(RuntimeError, match="out of memory"):
        take_step(method, model, 1)
    fresh, again = network(), METHODS["recycled"]
    fresh.load_state_dict(model.state_dict())
    other = again(fresh)
    other.resume(1)
    torch.testing.assert_close(take_step(method, model, 1), take_step(other, fresh, 1), rtol=0, atol=0)


def test_a_loss_that_was_never_backpropagated_does_not_make_recycled_unusable() -> None:
    model = network()
    method = METHODS["recycled"](model)
    method.loss((IMAGES[0].double(), LABELS))  # its backward pass failed
    with pytest.raises(ValueError, match="backpropagate"):
        take_step(method, model, 1)
    take_step(method, model, 1)


def test_twins_in_flight_of_a_failed_step_need_a_new_feed() -> None:
    model = network()
    method = conadv.ConAdv(model, F.cross_entropy, ATTACK, handoff=Queue(), chunk_size=4, seed=1)
    loader = [(IMAGES[number].double(), LABELS) for number in (0, 1)]
    model[2].left = 5  # after the two attacks before the first step, one within it, and one pass
    pairs = iter(method.feed(loader))
    now, ahead = next(pairs)
    with pytest.raises(RuntimeError, match="out of memory"):
        method(now, ahead)
    model[2].left = -1
    with pytest.raises(ValueError, match="the step before failed"):
        method(loader[0], loader[1])
    model.zero_grad()
    assert len([method(now, ahead) for now, ahead in method.feed(loader)]) == 2
