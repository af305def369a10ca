"""One rule for a step that raises: the method is unusable until its state is loaded or a new epoch begins.

After that, the step that failed has left no trace.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conadv import split_batchnorm
from support.settings import SETTINGS, Method, Setting, small_batches, small_cnn

BATCHES = small_batches(2)
USUAL = {setting.name: setting for setting in SETTINGS if setting.delay < 2}


class Fragile(nn.Module):
    """Fails once, after as many passes as `left` says."""

    left = -1

    def forward(self, images: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return images


def made(setting: Setting) -> tuple[nn.Sequential, Method]:
    model = nn.Sequential(split_batchnorm(small_cnn()), Fragile())
    method = setting.make(model, chunk_size=2, seed=1, shuffle_twins=2 if setting.adversarial else 1)
    return model, method


def take_step(method: Any, model: nn.Module, number: int) -> dict[str, Tensor]:
    """Everything that a step leaves."""
    model.zero_grad()
    losses = method(BATCHES[number])
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gradients = {f"{name}.grad": own.grad for name, own in model.named_parameters() if own.grad is not None}
    return {**model.state_dict(), **gradients, **losses._asdict()}


def fail(method: Any, model: Any, passes: int) -> None:
    """Take a step that raises after some passes."""
    model[1].left = passes
    with pytest.raises(RuntimeError, match="out of memory"):
        take_step(method, model, 1)
    model[1].left = -1


failing = pytest.mark.parametrize(
    ("name", "passes"), [(name, passes) for name in USUAL for passes in range(1, 3 if name == "vanilla" else 5)]
)


@failing
def test_nothing_but_a_new_epoch_or_a_state_makes_it_usable_again(name: str, passes: int) -> None:
    model, method = made(USUAL[name])
    take_step(method, model, 0)
    fail(method, model, passes)
    for _ in range(2):
        with pytest.raises(ValueError, match="failed in the middle: clear the gradients, and load a state"):
            take_step(method, model, 1)
    assert method.step == 1


@failing
@pytest.mark.parametrize("way", ["epoch", "state"])
def test_the_step_after_it_is_that_of_a_loop_without_it(name: str, passes: int, way: str) -> None:
    begun = 0 if way == "epoch" and name == "recycled" else 1  # what was carried over is dropped there
    ends = []
    for fails in (False, True):
        model, method = made(USUAL[name])
        if begun:
            take_step(method, model, 0)
        state = method.state_dict()
        if fails:
            fail(method, model, passes)
            if way == "state":
                method.load_state_dict(state)
            else:
                next(iter(method.feed([0])))
        ends.append(take_step(method, model, 1))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_a_batch_that_is_refused_before_it_is_learnt_from_is_no_failed_step() -> None:
    model, method = made(USUAL["conadv"])
    with pytest.raises(ValueError, match="not a whole number of chunks"):
        method((BATCHES[0][0][:7], BATCHES[0][1][:7]))
    take_step(method, model, 0)


def test_a_loss_that_was_never_backpropagated_is_a_failed_step_of_recycled() -> None:
    model, method = made(USUAL["recycled"])
    method.loss(BATCHES[0])  # its backward pass failed
    with pytest.raises(ValueError, match="backpropagate"):
        take_step(method, model, 1)
    next(iter(method.feed([0])))
    take_step(method, model, 1)
