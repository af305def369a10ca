"""A report that a person can read, and a sheet to look at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conadv.task.data.inspection import inspect_data
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


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_everything_is_counted_and_the_damaged_named(root: Path) -> None:
    found = inspect_data(root)
    assert found.kind == "image folder"
    assert found.train.counts == {"class0": 4, "class1": 3, "class2": 0}
    assert found.test.counts == {"class0": 1, "class1": 1, "class2": 0}
    assert (found.train.heights, found.train.widths) == ((10, 15, 20), (30, 30, 30))
    assert sorted(Path(problem.name).name for problem in found.damaged) == ["0005.JPEG", "class2", "note.png"]


def test_the_report_as_text_and_as_json(root: Path) -> None:
    found = inspect_data(root)
    text = "\n".join(found.lines())
    assert f"{root}: image folder" in text
    assert "7 images in 3 classes, 30 × 10 to 20 (median 30 × 15) pixels" in text
    assert "damaged: 3" in text
    assert f"{root}/val/class0/note.png: not an image of a known format" in text
    kept = json.loads(json.dumps(found.as_dict()))
    assert kept["train"]["by_class"]["class1"] == 3
    assert kept["test"]["images"] == 2
    assert kept["train"]["height"] == {"smallest": 10, "median": 15, "largest": 20}
    assert len(kept["damaged"]) == 3


def test_a_long_list_of_damage_is_cut_in_the_text_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, [*jpeg_set(2), *[(b"text", 0)] * 30], jpeg_set(2))
    found = inspect_data(tmp_path)
    assert "  and 10 more" in found.lines()
    assert len(found.as_dict()["damaged"]) == 30


def test_the_sheet_shows_images_in_the_row_of_their_class(root: Path, tmp_path: Path) -> None:
    inspect_data(root, tmp_path / "sheet.png")
    sheet = pixels_of(tmp_path / "sheet.png")
    assert sheet.shape == (3 * 110, 8 * 96, 3)
    first = Image.open(root / "train" / "class0" / "0000.JPEG").resize((94, 31), Image.Resampling.NEAREST)
    np.testing.assert_array_equal(sheet[14 : 14 + 31, :94], np.asarray(first))
    assert (sheet[2 * 110 + 14 :] == 255).all()  # the class without images
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a cache", "data", "sheet.png"]


def test_arrays_are_inspected_too(tmp_path: Path) -> None:
    images, labels = np.arange(120, dtype=np.uint8).reshape(6, 5, 4), np.array([0, 1, 2, 0, 1, 2])
    arrays = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(tmp_path / "a.npz", **arrays)
    found = inspect_data(tmp_path / "a.npz", tmp_path / "sheet.png")
    assert found.lines()[1] == "  train  6 images in 3 classes, 4 × 5 pixels"
    assert pixels_of(tmp_path / "sheet.png").shape == (330, 768, 3)


def test_of_many_classes_some_are_shown(tmp_path: Path) -> None:
    samples = [(encode(picture(i)), i) for i in range(40)]
    inspect_data(write_folder(tmp_path / "data", samples, samples), tmp_path / "sheet.png")
    assert pixels_of(tmp_path / "sheet.png").shape == (12 * 110, 768, 3)
