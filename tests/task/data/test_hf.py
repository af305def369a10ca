"""Data sets of the `datasets` library, from files on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conadv.task.data import open_data
from conadv.task.data.source import DamagedError
from task.data.hostile import TEST, TRAIN, cut, exercise, flip, insert, number, replace, special
from task.data.samples import jpeg_set, write_hub, write_table

SAMPLES = jpeg_set(6)


def test_names_of_classes_come_from_the_features(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}.parquet", SAMPLES, ["cat", "dog"])
    data = open_data("path", f"hf:{tmp_path}")
    assert data.train.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [label for _, label in SAMPLES]
    assert data.train.name(3) == f"hf:{tmp_path} train[3]"


def test_what_save_to_disk_wrote_is_read_and_validation_goes_before_test(tmp_path: Path) -> None:
    rows = {"img": [{"bytes": data, "path": None} for data, _ in SAMPLES], "fine_label": [0, 1, 2, 0, 1, 2]}
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b", "c"])})
    split = datasets.Dataset.from_dict(rows, features=features)
    parts = {"train": split, "test": split.select([0]), "validation": split.select([1, 2])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    data = open_data("path", f"hf:{tmp_path / 'saved'}")
    assert (len(data.train), data.test.labels.tolist(), data.test.classes) == (6, [1, 2], ("a", "b", "c"))


def test_rows_without_an_image_or_a_label_are_named(tmp_path: Path) -> None:
    write_table(tmp_path / "test.parquet", SAMPLES)
    write_table(tmp_path / "train.parquet", [*SAMPLES, (None, 0)])
    with pytest.raises(DamagedError, match=r"train\[6\]: no image"):
        open_data("path", f"hf:{tmp_path}").train.image(6)
    write_table(tmp_path / "train.parquet", [*SAMPLES, (SAMPLES[0][0], None)])
    with pytest.raises(ValueError, match=r"train\[6\] has label -1, but the 2 classes are numbered 0 to 1"):
        open_data("path", f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "label": [0]}, "its columns are text, label; it needs an image and a label"),
        ({"image": [b"a"], "label": ["cat"]}, "cat"),
        ({"image": [3], "label": [0]}, "hf:"),
    ],
)
def test_tables_of_something_else_are_refused(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    for part in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
    with pytest.raises(ValueError, match=message) as caught:
        open_data("path", f"hf:{tmp_path}")
    assert str(caught.value).isprintable()


def test_a_missing_split_or_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    write_table(tmp_path / "other.parquet", SAMPLES)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.parquet").write_bytes(b"PAR1 and no more")
    for path in (tmp_path / "bad", tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"^hf:{path}: ") as caught:
            open_data("path", f"hf:{path}")
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("seed", range(12))
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path, seed: int, capfd) -> None:
    random = Random(seed)
    place = write_hub(tmp_path / "data", TRAIN, TEST)
    files = sorted(file for file in (tmp_path / "data").rglob("*") if file.is_file())
    random.choice([flip, number, cut, insert, replace, special])(random, random.choice(files))
    assert exercise(seed, place) in ("read", "refused")
    assert capfd.readouterr().err == ""


def test_a_name_of_the_hub_is_looked_up_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hf:nobody/nothing: Couldn't reach 'nobody/nothing' on the Hub"):
        open_data("path", "hf:nobody/nothing")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:x: it needs the datasets library: pip install 'conadv\[hf\]'"):
        open_data("path", "hf:x")
