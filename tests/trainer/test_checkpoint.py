"""Checkpoints are complete or absent, anything else in their place is noticed, and a thread writes them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from conadv.trainer.checkpoint import (
    Checkpoint,
    CheckpointSaver,
    checkpoints,
    newest_whole,
    read_checkpoint,
    step_of,
    write_checkpoint,
)

ABOUT: dict[str, Any] = {
    "recipe": {"seed": 0},
    "versions": {"torch": "2"},
    "plain": [],
    "numbers": {},
    "position": {"seconds": 1.5, "layout": "clean"},
}


def make(folder: Path, step: int) -> Path:
    tensors = {"model.weight": torch.arange(40.0) + step, "model.count": torch.tensor(step)}
    path = folder / f"step-{step:08d}.safetensors"
    write_checkpoint(path, Checkpoint(tensors, {**ABOUT, "step": step}))
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 4 and 6."""
    make(tmp_path, 4)
    make(tmp_path, 6)
    return tmp_path


def sixth(two: Path) -> Path:
    return two / "step-00000006.safetensors"


def newest(folder: Path) -> tuple[int, list[str]]:
    """The step that a run would resume from, and what it would print."""
    told: list[str] = []
    return newest_whole(folder, told.append).about["step"], told


def test_what_was_written_is_read_here_by_safetensors_and_on_other_ranks(tmp_path):
    path = make(tmp_path, 7)
    one = read_checkpoint(path)
    assert torch.equal(one.tensors["model.weight"], torch.arange(40.0) + 7)
    assert one.tensors["model.count"].item() == 7
    assert one.about == {**ABOUT, "step": 7, "format": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    for tensors in (safetensors.torch.load_file(path), Checkpoint.unpack(one.pack()).tensors):
        assert tensors.keys() == one.tensors.keys()
        assert all(torch.equal(tensors[name], one.tensors[name]) for name in tensors)
    assert Checkpoint.unpack(one.pack()).about == one.about


def test_the_newest_come_first_also_beyond_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000, 5):
        make(tmp_path, step)
    for name in ("step-new.safetensors", "step-00000009.bak", ".step-00000009.safetensors.1-2.partial"):
        (tmp_path / name).write_bytes(b"half")
    names = [f"step-{step}.safetensors" for step in (100000000, 99999999, "00000005")]
    assert [path.name for path in checkpoints(tmp_path)] == names
    assert newest(tmp_path) == (100_000_000, [])


def test_any_flipped_bit_is_noticed_and_the_previous_checkpoint_is_taken(two):
    whole = sixth(two).read_bytes()
    places = random.Random(0)
    for _ in range(400):
        damaged, place, bit = bytearray(whole), places.randrange(len(whole)), places.randrange(8)
        damaged[place] ^= 1 << bit
        sixth(two).write_bytes(damaged)
        step, told = newest(two)
        assert step == 4, (place, bit)
        assert str(sixth(two)) in told[0] and "step-00000004" in told[1]
        assert len(told) == 2
    sixth(two).write_bytes(whole)
    assert newest(two) == (6, [])


def test_a_truncated_or_longer_file_is_noticed(two):
    whole = sixth(two).read_bytes()
    shorter = [whole[:length] for length in {*range(0, len(whole), 7), len(whole) - 1}]
    for data in (*shorter, whole + b"\0", whole + whole, b"\0" + whole):
        sixth(two).write_bytes(data)
        assert newest(two)[0] == 4


@pytest.mark.parametrize(
    "change",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path.name)],
    ids=["folder", "pipe", "device", "circle"],
)
def test_what_is_no_file_is_not_a_checkpoint(change: Callable[[Path], None], two):
    sixth(two).unlink()
    change(sixth(two))
    assert newest(two) == (4, [])


@pytest.mark.parametrize("part", ["os.fsync", "os.replace", "pathlib.Path.mkdir"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(part, two, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(part, full)
    with pytest.raises(OSError, match=r"cannot write .*step-00000008\S* \(No space left on device\): free some space"):
        make(two, 8)
    monkeypatch.undo()
    assert len(list(two.iterdir())) == 2
    assert newest(two) == (6, [])


def saver(folder: Path, keep: int = 2, start: int = 0, before: Any = lambda: None) -> CheckpointSaver:
    return CheckpointSaver(folder, keep, start, ABOUT, before)


def save(saver: CheckpointSaver, step: int) -> None:
    saver.save(step, Checkpoint({"x": torch.full((2,), step)}, {}), ABOUT["position"])


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints(folder / "checkpoints")]


def test_saving_does_not_wait_for_the_disk(tmp_path):
    disk = threading.Event()
    one = saver(tmp_path, before=disk.wait)
    save(one, 1)
    assert steps(tmp_path) == []
    one.check()  # nothing is known yet
    disk.set()
    one.close()
    assert steps(tmp_path) == [1]


def test_each_checkpoint_has_its_state_what_is_flushed_before_it_and_the_oldest_are_removed(tmp_path):
    seen: list[list[int]] = []
    one = saver(tmp_path, keep=1, before=lambda: seen.append(steps(tmp_path)))
    for step in (1, 2, 3):
        save(one, step)
    one.close()
    assert seen == [[], [1], [2]]
    assert steps(tmp_path) == [3]
    tensors, about = read_checkpoint(checkpoints(tmp_path / "checkpoints")[0])
    assert torch.equal(tensors["x"], torch.tensor([3, 3]))
    assert about == {**ABOUT, "step": 3, "format": 3}


def test_what_a_killed_run_did_not_remove_is_removed_by_the_next_even_if_it_saves_nothing(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path / "checkpoints", step)
    saver(tmp_path, start=3).close()
    assert steps(tmp_path) == [3, 2]


def test_newer_ones_which_could_not_be_used_are_neither_counted_nor_removed(tmp_path):
    for step in (1, 2, 4, 6):
        make(tmp_path / "checkpoints", step)
    one = saver(tmp_path, keep=1, start=2)
    assert steps(tmp_path) == [6, 4, 2]
    for step in (3, 4):
        save(one, step)
    one.close()
    assert steps(tmp_path) == [6, 4]


@pytest.mark.parametrize("ask", ["check", "close", "save"])
def test_a_failure_is_raised_once_where_it_is_next_asked_for(ask, tmp_path):
    def fail() -> None:
        raise OSError("disk full")

    one = saver(tmp_path, before=fail)
    save(one, 1)
    assert one._writing is not None
    wait([one._writing])
    calls = {"check": one.check, "close": one.close, "save": lambda: save(one, 2)}
    with pytest.raises(OSError, match="disk full"):
        calls[ask]()
    one.check()
    one.close()
