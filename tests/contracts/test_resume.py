"""Promise: stop after any step, restore into fresh objects, and the weights are those of a run that never stopped.

Here for one's own loop, which keeps the twins in flight themselves in `method.state_dict()`.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from conadv import PGD, split_batchnorm
from support.settings import Method, Setting, every_method, small_batches, small_cnn

EPOCHS = [small_batches(5), small_batches(5, seed=2)]
ATTACK = PGD(8 / 255, 5 / 255, random_start=0.5)


class Run:
    """What a user's script has: a model, an optimizer, a method, and a loop over epochs."""

    def __init__(self, setting: Setting) -> None:
        self.model: nn.Module = nn.Sequential(split_batchnorm(small_cnn()), nn.Dropout(0.3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.method: Method = setting.make(self.model, ATTACK, chunk_size=4, seed=7)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "method": self.method}

    def train(self, steps: int) -> None:
        """Go on until `steps` steps are taken, with a feed for each epoch."""
        for epoch in range(self.method.step // 5, len(EPOCHS)):
            for now, ahead in self.method.feed(EPOCHS[epoch][self.method.step % 5 :]):
                if self.method.step == steps:
                    return
                self.optimizer.zero_grad()
                self.method(now, ahead)
                self.optimizer.step()

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file.getvalue()

    def load(self, content: bytes) -> None:
        state = torch.load(io.BytesIO(content))  # which trusts no class of ours
        for name, part in self.parts().items():
            part.load_state_dict(state[name])

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


@every_method
def test_stop_anywhere_and_go_on(setting: Setting) -> None:
    never = Run(setting)
    never.train(10)
    saved = []
    stops = Run(setting)
    for step in range(11):
        stops.train(step)
        saved.append(stops.save())
        torch.manual_seed(step)  # what else has run in the process does not matter
        stops = Run(setting)
        stops.load(saved[-1])
    for key, value in never.weights().items():
        assert torch.equal(stops.weights()[key], value), key
    for step, content in enumerate(saved):  # and from each of them straight to the end
        run = Run(setting)
        run.load(content)
        assert run.method.step == step
        run.train(10)
        assert all(torch.equal(run.weights()[key], value) for key, value in never.weights().items())


@every_method
def test_a_state_is_small_and_does_not_change_later(setting: Setting) -> None:
    run = Run(setting)
    run.train(2)
    state = run.method.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    batches_in_flight = 1 if setting.method == "recycled" else 0
    assert sum(name.startswith("twins.") for name in state) == 2 * 2 * batches_in_flight
    run.train(4)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in state.items())
    assert safetensors.torch.load(safetensors.torch.save(state)).keys() == state.keys()


def test_a_state_of_another_delay_or_chunk_size_is_refused() -> None:
    run = Run(Setting("", "conadv", 2))
    run.train(2)
    state = run.method.state_dict()
    for setting, chunk_size in ((Setting("", "conadv", 1), 4), (Setting("", "conadv", 2), 8)):
        method = setting.make(run.model, ATTACK, chunk_size=chunk_size)
        with pytest.raises(ValueError, match=r"of another method: it has (delay 2 inst|chunk_size 4 inst)"):
            method.load_state_dict(state)


@pytest.mark.parametrize(("one", "other"), [("recycled", "conadv"), ("conadv", "recycled"), ("sam", "conadv")])
def test_the_state_of_another_method_is_refused_by_name(one: str, other: str) -> None:
    run = Run(Setting("", one, 1))
    run.train(2)
    method = Setting("", other, 1).make(run.model, ATTACK, chunk_size=4)
    with pytest.raises(ValueError, match=r"of another method: it has method \w+ instead of \w+$"):
        method.load_state_dict(run.method.state_dict())
