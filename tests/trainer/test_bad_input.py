"""Bad input that is found late leaves no folder behind; a run that is running is not resumed by another process."""

from __future__ import annotations

import os

import pytest

from conadv import cli
from support import tiny
from task.data.samples import jpeg_set, write_folder


@pytest.mark.parametrize(
    "words",
    [["--data.held-out", "5000"], ["--method", "recycled", "--attack.steps", "3"]],
    ids=" ".join,
)
@pytest.mark.parametrize("size", [1, 2])
def test_settings_that_do_not_go_together_leave_no_folder(words, size, start):
    run = start([*tiny.words(), *words], size)
    assert run.statuses() == [2] * size
    (line,) = run.complaints()
    assert "Traceback" not in run.said()
    assert not run.folder.exists(), line


@pytest.mark.parametrize("damage", ["dangling link", "damaged image"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_image_that_cannot_be_read_leaves_no_folder(damage, size, start, tmp_path):
    root = write_folder(tmp_path / "data", jpeg_set(24), jpeg_set(4))
    bad = root / "train" / "class1" / "0017.JPEG"
    data = bad.read_bytes()
    bad.unlink()
    if damage == "dangling link":
        bad.symlink_to(tmp_path / "nowhere.JPEG")
    else:
        bad.write_bytes(data[: len(data) // 2])
    fields = {"data__name": "none", "data__train_size": 24, "data__image_size": 16, "model": "support.tiny:pooled"}
    run = start(tiny.words(data__path=root, **fields), size)
    assert run.statuses() == [2] * size, run.said()
    (line,) = run.complaints()
    assert "0017.JPEG" in line
    assert not run.folder.exists()


def test_a_run_that_is_running_is_not_resumed(start, capsys):
    run = start(tiny.words(epochs=100_000), 1)
    run.wait_for_step(3)
    assert cli.main(["train", "--resume", str(run.folder), "--model", "support.tiny:net", "--quiet"]) == 2
    assert (
        f"{run.folder} is in use by process {run.processes[0].pid} on {os.uname().nodename}" in capsys.readouterr().err
    )
    assert run.statuses(timeout=0) == [None]
    run.kill(0)
    run.statuses()
    steps = len((run.folder / "metrics.jsonl").read_text().splitlines())
    words = ["--model", "support.tiny:net", "--quiet", "--max-steps", str(steps + 3)]
    assert cli.main(["train", "--resume", str(run.folder), *words]) == 0
