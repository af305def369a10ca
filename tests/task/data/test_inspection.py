"""A report that a person can read."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_everything_is_counted_and_the_damaged_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(json.dumps(inspect_data(root)))
    assert (found["kind"], found["train"], found["test"]) == ("image folder", 7, 2)
    assert [tuple(row.values()) for row in found["classes"]] == [("class0", 4, 1), ("class1", 3, 1), ("class2", 0, 0)]
    assert (found["smallest"], found["largest"]) == ([10, 16], [20, 30])
    assert sorted(Path(problem["name"]).name for problem in found["damaged"]) == ["0005.JPEG", "class2", "note.png"]
    cli.inspect_data(root)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{root}: image folder, 3 classes, 16 × 10 to 30 × 20 pixels"
    assert lines[4].split() == ["7", "train", "2", "test", "in", "all"]
    assert "damaged: 3" in lines
    assert f"  {root}/val/class0/note.png: not an image of a known format" in lines
