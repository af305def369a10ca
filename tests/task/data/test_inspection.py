"""A report that a person can read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conadv import cli
from conadv.task.data.open import inspect_data
from task.data.samples import encode, jpeg_set, picture, write_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten images of three sizes in two classes, three of them damaged in different ways."""
    train = [(encode(picture(i, 10 + 5 * (i % 3), 30)), i // 4) for i in range(8)]
    write_folder(tmp_path / "data", train, jpeg_set(2))
    broken = tmp_path / "data" / "train" / "class1" / "0005.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    (tmp_path / "data" / "val" / "class0" / "note.png").write_text("no image")
    (tmp_path / "data" / "train" / "class2").mkdir()
    return tmp_path / "data"


def printed(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    cli.inspect_data(path)
    return capsys.readouterr().out.splitlines()


def test_everything_is_counted_and_the_damaged_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(json.dumps(inspect_data(root)))
    assert (found["kind"], found["train"], found["test"]) == ("image folder", 7, 2)
    assert [tuple(row.values()) for row in found["classes"]] == [("class0", 4, 1), ("class1", 3, 1), ("class2", 0, 0)]
    assert (found["smallest"], found["largest"]) == ([10, 16], [20, 30])
    assert sorted(Path(problem["name"]).name for problem in found["damaged"]) == ["0005.JPEG", "class2", "note.png"]
    lines = printed(root, capsys)
    assert lines[0] == f"{root}: image folder, 3 classes, 16 × 10 to 30 × 20 pixels"
    assert lines[4].split() == ["7", "train", "2", "test", "in", "all"]
    assert "damaged: 3" in lines
    assert f"  {root}/val/class0/note.png: not an image of a known format" in lines


def test_arrays_are_inspected_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = np.arange(120, dtype=np.uint8).reshape(6, 5, 4), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    assert printed(tmp_path / "a.npz", capsys)[0].endswith("a.npz: NumPy arrays, 3 classes, 4 × 5 pixels")
