"""A copy of the state in safetensors' format, made in the background while training computes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conadv.core.twins import StaleWeights
from conadv.trainer.checkpoint import Checkpoint, read_checkpoint
from conadv.trainer.ema import Ema
from conadv.trainer.saver import Saver
from conadv.trainer.snapshot import Snapshot
from conadv.trainer.state import gather, live_state

ABOUT: dict[str, Any] = {"recipe": {}, "versions": {}, "plain": [], "position": {"seconds": 0.0, "skipped": 0}}
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)


def tensors() -> dict[str, Tensor]:
    """Of every type, with odd sizes, without dimensions, without elements, and with other layouts in memory."""
    of_types = {f"{dtype}": torch.arange(5).to(dtype) for dtype in (*TYPES, torch.int8, torch.uint8, torch.bool)}
    image = torch.rand(2, 3, 5, 7)
    return {
        **of_types,
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": image[0, 0].t(),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "größe": torch.ones(1),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    equal = all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
    return one.keys() == other.keys() and equal


def test_safetensors_reads_what_was_copied():
    state = tensors()
    assert same(safetensors.torch.load(bytes(Snapshot(state).copy())), state)


def test_a_buffer_is_used_again_where_it_fits():
    first = Snapshot({"x": torch.ones(3)})
    second = Snapshot({"x": torch.zeros(3)}, first.buffer)
    assert second.buffer is first.buffer
    assert same(safetensors.torch.load(bytes(second.copy())), {"x": torch.zeros(3)})
    assert Snapshot({"x": torch.zeros(4)}, first.buffer).buffer is not first.buffer


class Copies(TorchDispatchMode):
    """Counts the numbers that operators of this thread write."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(result, Tensor):
            self.numbers += result.numel()
        return result


def test_training_copies_nothing_of_the_weights_and_goes_on_while_they_are_copied_and_written(tmp_path: Path):
    size = 100_000
    weights, disk = torch.arange(float(size)), threading.Event()
    saver = Saver(tmp_path, keep=1)
    for step in (1, 2):
        disk.clear()
        with Copies() as copies:
            saver.save(step, Checkpoint({"weights": weights}, ABOUT), before=disk.wait)
            saver.before_update()
        # The first one asks for memory; the header is a few hundred bytes.
        assert copies.numbers <= (2 * 4 * size if step == 1 else 0) + 5000
        weights += 1  # the update, while the disk is still awaited
        disk.set()
        saver.wait()
        saved = read_checkpoint(tmp_path / f"step-{step:08d}").tensors["weights"]
        assert torch.equal(saved, weights - 1)
    saver.before_update()  # nothing is awaited
    saver.close()


def test_a_copy_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: Snapshot) -> memoryview:
        raise MemoryError("none left")

    monkeypatch.setattr(Snapshot, "copy", fail)
    saver = Saver(tmp_path, keep=1)
    saver.save(1, Checkpoint({"x": torch.ones(1)}, ABOUT), before=lambda: None)
    with pytest.raises(MemoryError):
        saver.before_update()
    with pytest.raises(MemoryError):
        saver.wait()
    saver.close()


def test_the_live_state_stays_while_attacks_and_forward_passes_run():
    """Stale weights take the place of a model's, and layers move their statistics, before the copy is made."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    stale, ema = StaleWeights(model, 1), Ema(model, 0.5)
    model(torch.rand(4, 2)).square().sum().backward()
    optimizer.step()
    expected = gather(model, optimizer, stale, ema)
    live = live_state(model, optimizer, stale, ema)
    model(torch.rand(4, 2))
    with stale.swapped_in():
        assert not torch.equal(model[0].weight, expected["model.0.weight"])
        assert same(live, expected)
    assert same(live, expected)
