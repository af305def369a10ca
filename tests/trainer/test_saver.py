"""Checkpoints are written beside the training, one after the other, and what goes wrong is not lost."""

from __future__ import annotations

import threading

import pytest
import torch

from conadv.trainer.checkpoint import Checkpoint, checkpoints, write_checkpoint
from conadv.trainer.saver import Saver


def state() -> Checkpoint:
    return Checkpoint({"x": torch.ones(2)}, {})


def test_saving_does_not_wait_for_the_disk(tmp_path):
    disk = threading.Event()
    saver = Saver(tmp_path, keep=2)
    saver.save(1, state(), before=disk.wait)
    assert checkpoints(tmp_path) == []
    saver.check()  # nothing is known yet
    disk.set()
    saver.wait()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    saver.close()


def test_what_must_be_on_disk_before_comes_before(tmp_path):
    seen = []
    saver = Saver(tmp_path, keep=1)
    for step in (1, 2, 3):
        saver.save(step, state(), before=lambda: seen.append([path.name for path in checkpoints(tmp_path)]))
    saver.wait()
    saver.close()
    assert seen == [[], ["step-00000001"], ["step-00000002"]]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]


def test_what_a_killed_run_did_not_remove_is_removed_by_the_next_even_if_it_saves_nothing(tmp_path):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, state())
    Saver(tmp_path, keep=2).close()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000002"]


@pytest.mark.parametrize("ask", ["check", "wait", "save"])
def test_a_failure_is_raised_once_where_it_is_next_asked_for(ask, tmp_path):
    def fail() -> None:
        raise OSError("disk full")

    saver = Saver(tmp_path, keep=1)
    saver.save(1, state(), before=fail)
    while saver._writing is not None and not saver._writing.done():
        pass
    calls = {"check": saver.check, "wait": saver.wait, "save": lambda: saver.save(2, state(), before=lambda: None)}
    with pytest.raises(OSError, match="disk full"):
        calls[ask]()
    saver.wait()
    saver.close()
