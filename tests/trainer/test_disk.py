"""A disk that is full or read-only ends a run with one clear line, and what was good before stays good."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conadv import cli
from conadv.trainer.checkpoint import checkpoints, read_checkpoint, step_of
from support import tiny


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk without the right to mount one: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def fill_all_but(disk: Path, room: int) -> None:
    free = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_bsize - room))


def train(folder: Path, *words: str) -> int:
    return cli.main(["train", *tiny.words(checkpoint__every=1), "--run", str(folder), "--quiet", *words])


def resume(folder: Path, *words: str) -> int:
    return cli.main(["train", "--resume", str(folder), "--model", "support.tiny:net", "--quiet", *words])


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was said."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def assert_sound(folder: Path, steps: set[int]) -> None:
    """Exactly these checkpoints are there and whole, and nothing is half written."""
    found = {read_checkpoint(path).about["step"] for path in checkpoints(folder / "checkpoints")}
    assert found == steps
    assert not list(folder.rglob("*.partial"))
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert metrics == b"" or metrics.endswith(b"\n")


@pytest.mark.parametrize("room", [0, 60_000])
def test_a_disk_that_is_full_before_or_while_checkpoints_are_written(room, disk, tmp_path, capsys):
    assert train(disk / "run", "--max-steps", "2", "--checkpoint.keep", "1000") == 0
    fill_all_but(disk, room)
    capsys.readouterr()
    assert resume(disk / "run", "--max-steps", "none") == 1
    assert "No space left on device): free some space, then resume" in complaint(capsys)
    reached = {step_of(path) for path in checkpoints(disk / "run" / "checkpoints")}
    assert reached == set(range(1, len(reached) + 1))
    assert len(reached) == 2 if room == 0 else len(reached) > 2
    assert_sound(disk / "run", reached)
    (disk / "ballast").unlink()
    assert resume(disk / "run", "--max-steps", "none", "--checkpoint.keep", "2") == 0
    assert train(tmp_path / "whole") == 0
    assert tiny.equal(tiny.state(disk / "run"), tiny.state(tmp_path / "whole"))


def test_a_disk_that_can_only_be_read(disk, capsys):
    assert train(disk / "run", "--max-steps", "2") == 0
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    capsys.readouterr()
    assert resume(disk / "run", "--max-steps", "none") == 1
    assert "(Read-only file system)" in complaint(capsys)
    assert_sound(disk / "run", {1, 2})
    assert train(disk / "other") == 2
    assert "(Read-only file system): choose another folder" in complaint(capsys)


def test_a_rank_that_leads_tells_of_its_disk_and_all_end(start, tmp_path):
    """The failure of a thread on one rank reaches all."""
    (tmp_path / "run").mkdir()
    words = tiny.words(epochs=100_000, checkpoint__every=5, layout="clean | adv | attack")
    run = start(words, 3)
    run.wait_for_step(3)
    checkpoints_folder = run.folder / "checkpoints"
    while not checkpoints_folder.exists():
        run.wait_for_step(1)
    moved = run.folder / "away"
    checkpoints_folder.rename(moved)
    checkpoints_folder.write_text("in the way")
    assert run.statuses() == [1, 1, 1]
    (line,) = run.complaints()
    assert line.startswith("error: rank 0 (lane 0, clean): cannot write ")
    assert "Traceback" not in run.said()
