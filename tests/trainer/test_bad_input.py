"""Bad input that is found late leaves no folder behind; a run that is running is not resumed by another process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conadv import cli
from support import tiny


def images(root: Path) -> Path:
    """An image folder of two classes, small enough for a step per epoch."""
    for part, count in (("train", 12), ("test", 2)):
        for kind in ("cat", "dog"):
            folder = root / part / kind
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return root


def train(run: Path, *words: str) -> int:
    return cli.main(["train", "--run", str(run), "--quiet", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--data.held-out", "5000"],
        ["--method", "recycled", "--attack.steps", "3"],
        ["--method", "recycled", "--adv-weight", "1"],
    ],
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
    root = images(tmp_path / "data")
    bad = root / "train" / "dog" / "07.png"
    data = bad.read_bytes()
    bad.unlink()
    if damage == "dangling link":
        bad.symlink_to(tmp_path / "nowhere.png")
    else:
        bad.write_bytes(data[: len(data) // 2])
    fields = {
        **tiny.FIELDS,
        "data.path": root,
        "data.train_size": 24,
        "model": "support.tiny:pooled",
        "data.image_size": 16,
    }
    words = [word for key, value in fields.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    run = start(words, size)
    assert run.statuses() == [2] * size, run.said()
    (line,) = run.complaints()
    assert "07.png" in line
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
