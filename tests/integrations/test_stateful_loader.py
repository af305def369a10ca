"""A loop of one's own with torchdata's StatefulDataLoader: stopped after any step, it ends with the same weights."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from support.frameworks import ATTACK, NAMES, assert_equal, loader, make, prepared, sgd

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed: make integrations")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
EPOCHS, BATCHES = 2, 4


class Training:
    """Everything that a loop has, and its state as a file."""

    def __init__(self, name: str) -> None:
        self.model = prepared(name)
        self.optimizer = sgd(self.model)
        self.method = make(name, self.model, ATTACK, seed=3)
        self.loader = torchdata.StatefulDataLoader(loader(BATCHES).dataset, batch_size=8)
        self.epoch = 0

    @property
    def parts(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if name != "epoch"}

    def save(self) -> io.BytesIO:
        state = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save({"epoch": self.epoch, **state}, file := io.BytesIO())
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        state = torch.load(file, weights_only=False)  # of this test itself; a loader's state may hold anything
        self.epoch = state["epoch"]
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def run(self, stop: int | None = None) -> io.BytesIO | None:
        for epoch in range(self.epoch, EPOCHS):
            self.epoch = epoch
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.method.loss(batch).backward()
                self.optimizer.step()
                if self.method.step == stop:
                    return self.save()
        return None


@pytest.mark.parametrize("name", NAMES)
def test_stopped_after_any_step(name: str) -> None:
    whole = Training(name)
    whole.run()
    for stop in range(1, EPOCHS * BATCHES):
        file = Training(name).run(stop)
        assert file is not None
        resumed = Training(name)
        resumed.load(file)
        resumed.run()
        assert resumed.method.step == EPOCHS * BATCHES, f"stopped after step {stop}"
        assert_equal(resumed.model.state_dict(), whole.model.state_dict())
