"""The folder of a run: claimed once, locked while the run lasts, found again, and never taken from another run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from conadv.trainer.folder import RunFolder, default_folder, holds, write_summary


def claim(path: Path, config: str, is_new: bool = True) -> None:
    """A run that came to its end."""
    folder = RunFolder(path, config, is_new)
    folder.open()
    folder.close()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_folder_that_holds_a_run_or_anything_else_is_left_alone(tmp_path):
    claim(tmp_path / "a" / "b", "config")
    with pytest.raises(ValueError, match="already holds a run"):
        claim(tmp_path / "a" / "b", "other")
    assert names(tmp_path / "a" / "b") == ["config.toml", "run.lock"]
    assert (tmp_path / "a" / "b" / "config.toml").read_text() == "config"
    (tmp_path / "thesis.tex").write_text("years of work")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="is not an empty folder"):
            claim(path, "config")
    with pytest.raises(ValueError, match=r"cannot make .*Not a directory"):
        claim(tmp_path / "thesis.tex" / "run", "config")
    assert names(tmp_path) == ["a", "thesis.tex"]


def test_a_run_that_was_killed_before_it_had_its_folder_can_be_started_again(tmp_path):
    (tmp_path / ".config.toml.123-456.partial").write_text("half")
    (tmp_path / "run.lock").write_text("")
    claim(tmp_path, "config")
    assert names(tmp_path) == ["config.toml", "run.lock"]


def test_runs_are_numbered(tmp_path):
    assert default_folder(tmp_path, "digits", "config", restarted=False) == tmp_path / "digits-001"
    claim(tmp_path / "digits-001", "config")
    claim(tmp_path / "digits-007", "config")
    assert default_folder(tmp_path, "digits", "config", restarted=False) == tmp_path / "digits-008"
    assert default_folder(tmp_path, "other", "config", restarted=False) == tmp_path / "other-001"


@pytest.mark.parametrize(("config", "number"), [("config", 1), ("of another run", 2)])
def test_when_torchrun_starts_again_the_run_goes_on_in_its_folder(config, number, tmp_path):
    """The folder may be of another run, which was the reason why the first start was refused."""
    claim(tmp_path / "digits-001", "config")
    assert holds(tmp_path / "digits-001", config) == (number == 1)
    assert default_folder(tmp_path, "digits", config, restarted=True) == tmp_path / f"digits-00{number}"
    assert not holds(tmp_path / "nowhere", config)


def test_a_run_that_goes_on_keeps_its_file_unless_the_recipe_changed(tmp_path):
    claim(tmp_path, "config")
    before = (tmp_path / "config.toml").stat().st_ino
    claim(tmp_path, "config", is_new=False)
    assert (tmp_path / "config.toml").stat().st_ino == before
    claim(tmp_path, "config with more ranks", is_new=False)
    assert (tmp_path / "config.toml").read_text() == "config with more ranks"
    assert names(tmp_path) == ["config.toml", "run.lock"]


def test_a_summary_is_json_though_the_run_diverged(tmp_path):
    write_summary(tmp_path, {"test_top1": 10.0, "test_loss": float("nan"), "train_loss": float("inf"), "epsilon": None})
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary == {"test_top1": 10.0, "test_loss": None, "train_loss": None, "epsilon": None}


@pytest.mark.parametrize("place", ["run", "runs/one"])
def test_after_bad_input_a_new_run_leaves_nothing_behind_but_what_is_not_its_own(place, tmp_path):
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / place, "config", is_new=True)
    folder.open()
    (folder.path / "metrics.jsonl").write_text("{}")
    (folder.path / "checkpoints").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("put there while it ran")
    folder.close(status=2)
    assert names(tmp_path) == ["run"]
    assert names(tmp_path / "run") == ["notes.txt"]


@pytest.mark.parametrize("case", ["has a checkpoint", "failed", "is resumed"])
def test_a_run_of_which_something_came_stays(case, tmp_path):
    if case == "is resumed":
        claim(tmp_path, "config")
    folder = RunFolder(tmp_path, "config", is_new=case != "is resumed")
    folder.open()
    if case == "has a checkpoint":
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "step-00000001.safetensors").touch()
    folder.close(status=1 if case == "failed" else 2)
    assert (tmp_path / "config.toml").exists()


def lock(path: Path) -> RunFolder:
    """A process that resumes the run of a folder."""
    folder = RunFolder(path, "config", is_new=False)
    folder._acquire()
    return folder


def test_a_folder_in_use_is_refused_and_free_after_its_end(tmp_path):
    one = lock(tmp_path)
    place = f"process {os.getpid()} on {socket.gethostname()}"
    for _ in range(2):  # the holder is named each time
        with pytest.raises(ValueError, match=f"is in use by {place}: stop that run or wait"):
            lock(tmp_path)
    one.close()
    lock(tmp_path).close()


def test_a_new_run_in_a_folder_that_another_process_just_took_is_refused(tmp_path):
    one = lock(tmp_path)
    folder = RunFolder(tmp_path, "config", is_new=True)
    with pytest.raises(ValueError, match="is in use by"):
        folder.open()
    folder.close(status=2)
    assert names(tmp_path) == ["run.lock"]
    one.close()


def test_a_lock_that_points_elsewhere_is_refused_and_left_alone(tmp_path):
    """As in a run of someone else's: the lock would be written over a file of the user's."""
    (tmp_path / "run").mkdir()
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "notes")
    with pytest.raises(ValueError, match="is a symbolic link: remove it"):
        lock(tmp_path / "run")
    assert (tmp_path / "notes").read_text() == "mine"
