"""The folder of a run: claimed once, found again, and never taken from another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from conadv.train.folder import claim, default_folder, is_restart, reopen


def test_a_new_folder_holds_the_recipe_alone(tmp_path):
    claim(tmp_path / "a" / "b", "config")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.toml"]
    assert (tmp_path / "a" / "b" / "config.toml").read_text() == "config"


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    claim(tmp_path, "config")
    with pytest.raises(ValueError, match="already holds a run"):
        claim(tmp_path, "other")
    assert (tmp_path / "config.toml").read_text() == "config"


def test_a_folder_that_holds_anything_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is not an empty folder"):
        claim(tmp_path, "config")
    with pytest.raises(ValueError, match="is not an empty folder"):
        claim(tmp_path / "thesis.tex", "config")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot make .*Not a directory"):
        claim(tmp_path / "file" / "run", "config")


def test_runs_are_numbered(tmp_path):
    assert default_folder(tmp_path, "digits", "config") == tmp_path / "digits-001"
    claim(tmp_path / "digits-001", "config")
    claim(tmp_path / "digits-007", "config")
    assert default_folder(tmp_path, "digits", "config") == tmp_path / "digits-008"
    assert default_folder(tmp_path, "other", "config") == tmp_path / "other-001"


def test_when_torchrun_starts_again_the_run_goes_on_in_its_folder(tmp_path, monkeypatch):
    claim(tmp_path / "digits-001", "config")
    assert not is_restart(tmp_path / "digits-001", "config")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_restart(tmp_path / "digits-001", "config")
    assert default_folder(tmp_path, "digits", "config") == tmp_path / "digits-001"


def test_when_torchrun_starts_again_the_folder_of_another_run_is_left_alone(tmp_path, monkeypatch):
    """As it is when the first start was refused because of that folder."""
    claim(tmp_path / "digits-001", "other")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not is_restart(tmp_path / "digits-001", "config")
    assert not is_restart(tmp_path / "nowhere", "config")
    assert default_folder(tmp_path, "digits", "config") == tmp_path / "digits-002"


def test_a_run_that_goes_on_keeps_its_file_unless_the_recipe_changed(tmp_path):
    claim(tmp_path, "config")
    before = (tmp_path / "config.toml").stat().st_ino
    reopen(tmp_path, "config", 0)
    assert (tmp_path / "config.toml").stat().st_ino == before
    reopen(tmp_path, "config with more ranks", 0)
    assert (tmp_path / "config.toml").read_text() == "config with more ranks"
    assert [path.name for path in Path(tmp_path).iterdir()] == ["config.toml"]
