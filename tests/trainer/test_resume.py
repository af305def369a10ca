"""A run goes on from its newest whole checkpoint, whatever else lies in its folder, or says why it cannot."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conadv import cli
from support import tiny
from support.forged import description, forge

STEPS = 6


def train(folder: Path, **changes: Any) -> None:
    assert cli.main(["train", *tiny.words(**changes), "--run", str(folder), "--quiet"]) == 0


def resume(folder: Path, *words: str) -> int:
    return cli.main(["train", "--resume", str(folder), "--model", "support.tiny:net", "--quiet", *words])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The same run, as it was after 4 of its 6 steps; it has checkpoints of steps 2 and 4."""
    folder = tmp_path / "run"
    train(folder, max_steps=4)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}.safetensors"


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b"") and None,
    "of another seed": lambda path: forge(path, recipe={**description(path)["recipe"], "seed": 1}),
    "of no recipe": lambda path: forge(path, recipe={}),
    "of another version": lambda path: forge(path, format=2),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, run, whole, capsys):
    newest = step(run, 4)
    damage(newest)
    assert resume(run, "--max-steps", "none") == 0
    told = capsys.readouterr().err
    assert str(newest) in told
    assert f"falling back to the previous checkpoint: {step(run, 2)}" in told
    assert "Traceback" not in told
    assert tiny.equal(tiny.state(run), tiny.state(whole))
    assert lines(run) == lines(whole)


@pytest.mark.parametrize("command", ["train", "eval", "export"])
def test_without_a_whole_checkpoint_nothing_is_begun(command, run, tmp_path, capsys):
    for file in run.glob("checkpoints/step-*"):
        flip(file)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = {"train": ["--resume"], "eval": [], "export": []}[command]
    model = [] if command == "export" else ["--model", "support.tiny:net"]
    out = [str(tmp_path / "out.safetensors")] if command == "export" else []
    assert cli.main([command, *words, str(run), *out, *model]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert (
        told[-1] == f"error: {run / 'checkpoints'} has no intact checkpoint of this run to resume from: start a new run"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer__lr": 3, "method": "recycled"}, "its recipe differs in method, optimizer.lr"),
        ({"method": "conadv", "delay": 2}, "its recipe differs in delay"),
    ],
)
def test_a_checkpoint_of_another_run_is_passed_over(changes, named, run, whole, tmp_path, capsys):
    train(tmp_path / "other", **changes, max_steps=5)
    shutil.copy(step(tmp_path / "other", 5), step(run, 5))
    assert resume(run, "--max-steps", "none") == 0
    assert f"{step(run, 5)} is of another run: {named}" in capsys.readouterr().err
    assert tiny.equal(tiny.state(run), tiny.state(whole))


@pytest.mark.parametrize(("share", "status"), [("1", 0), ("1/2", 2)])
def test_a_field_that_a_checkpoint_lacks_has_its_default(share, status, tmp_path, capsys):
    """As one has that an older version wrote."""
    train(tmp_path / "run", twin_share=share, max_steps=2)
    path = step(tmp_path / "run", 2)
    forge(path, recipe={key: value for key, value in description(path)["recipe"].items() if key != "twin_share"})
    assert resume(tmp_path / "run", "--max-steps", "3") == status
    assert ("is of another run: its recipe differs in twin_share" in capsys.readouterr().err) == bool(status)


def test_a_checkpoint_of_another_model_is_passed_over(run, whole, monkeypatch, capsys):
    """Such as one of code that has changed since."""
    monkeypatch.setattr(tiny, "net", lambda **sizes: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    assert resume(run) == 2
    told = capsys.readouterr().err
    assert "is of another model: tensor" in told
    assert told.splitlines()[-1].startswith("error:")


def test_a_run_without_a_checkpoint_yet_starts_from_its_first_step_and_says_so(run, whole, capsys):
    shutil.rmtree(run / "checkpoints")
    assert resume(run, "--max-steps", "none") == 0
    assert "has no checkpoint yet: starting from its first step" in capsys.readouterr().err
    assert tiny.equal(tiny.state(run), tiny.state(whole))
    assert lines(run) == lines(whole)


def test_what_a_killed_run_left_half_written_is_swept(run, whole):
    (run / "checkpoints" / ".step-00000006.safetensors.1-2.partial").write_bytes(b"half")
    (run / ".metrics.jsonl.partial").write_text("half")
    (run / ".config.toml.partial").write_text("half")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n{"step": 5')
    assert resume(run, "--max-steps", "none") == 0
    assert not list(run.rglob("*.partial"))
    assert lines(run) == lines(whole)


def photographs(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 12) -> str:
    """Small images in an image folder."""
    for part, name in itertools.product(("train", "val"), classes):
        (folder / part / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(folder / part / name / f"{number:02}.png")
    return str(folder)


def test_other_data_is_refused_and_data_that_moved_is_not(tmp_path, capsys):
    path, run = photographs(tmp_path / "photos"), tmp_path / "run"
    train(run, data__path=path, data__train_size=None, batch_size=8, max_steps=2)
    before = step(run, 2).read_bytes()
    more = photographs(tmp_path / "more", count=13)
    assert resume(run, "--data.path", more) == 2
    told = f"error: the data at {more} is not that of the run (training images 24, then 26): give --data.path the same "
    assert capsys.readouterr().err == told + "images, or start a new run\n"
    assert cli.main(["eval", str(run), "--model", "support.tiny:net", "--data.path", more]) == 0
    for classes in (("cat", "fox"), ("cat", "dog", "fox")):
        other = photographs(tmp_path / str(len(classes)) / "other", classes)
        assert cli.main(["eval", str(run), "--model", "support.tiny:net", "--data.path", other]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"the data at {other} is not that of the run (classes ['cat', 'dog'], then ['cat', " in line
    moved = Path(path).rename(tmp_path / "moved")
    assert step(run, 2).read_bytes() == before
    assert resume(run, "--data.path", str(moved), "--max-steps", "3") == 0
    forge(step(run, 3), data={})  # as of an older version
    assert resume(run, "--data.path", more, "--max-steps", "4") == 0


def test_other_versions_and_damaged_metrics_are_told(run, capsys):
    forge(step(run, 4), versions={"conadv": "0.0.1"})
    path = run / "metrics.jsonl"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([text[0], "x\n", *text[2:]]))
    assert resume(run) == 0
    told = capsys.readouterr().err
    assert "numbers may differ in their last digits" in told
    assert "metrics.jsonl was damaged: 3 of the steps before 4 have no line" in told
