"""Stopped in the middle of an epoch, other libraries' loops resume bit for bit; sharded weights take the same steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from support.frameworks import (
    ATTACK,
    NAMES,
    accelerate_resumed,
    assert_equal,
    lightning_resumed,
    loader,
    make,
    prepared,
    sgd,
    sharded,
)
from support.ranks import Pool

# Libraries warn of their own settings; what conadv says stays an error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*ranks differ")]
each = pytest.mark.parametrize("name", NAMES)
EPOCHS, BATCHES = 2, 4


@each
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("library", "loop", "stop"), [("lightning", lightning_resumed, 6), ("accelerate", accelerate_resumed, 2)]
)
def test_on_one_rank_and_on_two(library: str, loop: Any, stop: int, size: int, name: str, tmp_path: Path, pool: Pool):
    pytest.importorskip(library, reason=f"{library} is not installed: make integrations")
    whole = pool.run(size, loop, name, str(tmp_path / "whole"), None)
    resumed = pool.run(size, loop, name, str(tmp_path / "resumed"), stop)
    for one, other in zip(whole, resumed, strict=True):
        assert_equal(other, one)


@each
def test_fully_shard_takes_the_steps_of_distributed_data_parallel_and_resumes(name: str, pool: Pool) -> None:
    """With a real attack: weights of the wrong age would give other twins. Its state is whole, as a file has it."""
    reference = pool.run(2, sharded, name, "ddp", 4)[0]
    resumed = pool.run(2, sharded, name, "fsdp", 4, True)
    for state, other in zip(pool.run(2, sharded, name, "fsdp", 4), resumed, strict=True):
        for key in (key for key in reference if "running" not in key and "tracked" not in key):
            torch.testing.assert_close(state[key], reference[key], rtol=0, atol=1e-10)
        assert_equal(other, state)


class Training:
    """Everything that a loop of one's own with torchdata's StatefulDataLoader has, and its state as a file."""

    def __init__(self, name: str) -> None:
        torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="not installed: make integrations")
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


@each
def test_a_loop_of_ones_own_after_any_step(name: str) -> None:
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
