"""Checkpoints are written while training continues, one after the other, and an error of the thread is not lost."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from conadv.trainer.checkpoint import (
    Checkpoint,
    CheckpointSaver,
    NullSaver,
    checkpoints,
    read_checkpoint,
    step_of,
    write_checkpoint,
)

ABOUT: dict[str, Any] = {"recipe": {}, "versions": {}, "plain": []}
POSITION = {"seconds": 0.0, "skipped": 0}


def saver(folder: Path, keep: int = 2, before: Any = lambda: None) -> CheckpointSaver:
    return CheckpointSaver(folder, keep, ABOUT, before)


def save(saver: CheckpointSaver, step: int) -> None:
    saver.save(step, lambda: {"x": torch.full((2,), step)}, position=POSITION)


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
    assert about == {**ABOUT, "position": POSITION, "step": 3, "format": 2}


def test_what_a_killed_run_did_not_remove_is_removed_by_the_next_even_if_it_saves_nothing(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / "checkpoints", step, Checkpoint({}, {}))
    saver(tmp_path).close()
    assert steps(tmp_path) == [3, 2]


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


def test_a_checkpoint_is_due_once_after_its_time(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    one = saver(tmp_path)
    assert not one.requests_save(60)
    now = 160.0
    assert [one.requests_save(0), one.requests_save(60), one.requests_save(60)] == [False, True, False]
    save(one, 1)
    assert not one.requests_save(60)
    now = 220.0
    assert one.requests_save(60)
    assert not NullSaver().requests_save(60)
    one.close()
