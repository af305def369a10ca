"""Your own Dataset, named as package.module:callable, and data sets of the `datasets` library, from files on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from conadv.task.augment import augmentation
from conadv.task.data import open_data
from conadv.task.data.source import DamagedError
from conadv.task.stream import Stream
from task.data.samples import jpeg_set, picture, write_table

SAMPLES = jpeg_set(6)
PIXELS = [picture(seed, 12, 16) for seed in range(10)]


class Images(Dataset):
    """Items of one of the kinds that people have."""

    def __init__(self, make, labels=None) -> None:
        self.make, self.labels = make, labels or [0, 1] * 5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[object, int]:
        return self.make(PIXELS[index]), self.labels[index]


class Named(Images):
    """With the labels and the names of the classes that torchvision's have."""

    classes = ("cat", "dog", "cow")
    targets = torch.tensor([2, 1] * 5)


class Other(Named):
    classes = ("cat", "cow", "dog")


class Some(Images):
    """Of which one item is no image."""

    def __init__(self, wrong: int | None) -> None:
        super().__init__(KINDS["array"])
        self.wrong = wrong

    def __getitem__(self, index: int) -> tuple[object, int]:
        return ("text" if index == self.wrong else PIXELS[index]), self.labels[index]


KINDS = {
    "Pillow": Image.fromarray,
    "array": lambda pixels: pixels,
    "bytes": lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1),
    "floats": lambda pixels: torch.from_numpy(pixels).permute(2, 0, 1) / 255,
}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch):
    """Make a function importable as mydata:make."""

    def name(make) -> str:
        module = ModuleType("mydata")
        module.make = make
        monkeypatch.setitem(sys.modules, "mydata", module)
        return "mydata:make"

    return name


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_every_kind_give_the_same_stream(named, kind: str) -> None:
    data = open_data(None, named(lambda: (Images(KINDS[kind]), Images(KINDS[kind], [1, 0]))))
    assert (len(data.train), len(data.test), data.train.classes, data.notes) == (10, 2, ("0", "1"), ())
    assert data.train.name(3) == "mydata:make train[3]"
    for index in range(10):
        np.testing.assert_array_equal(data.train.image(index), PIXELS[index])
    chunk = Stream(data.train, 4, 2, 0, augmentation("crop-flip", 8), workers=2).chunk(0, 0)
    assert chunk[0].shape == (2, 3, 8, 8)


def test_one_dataset_is_split_and_its_names_and_labels_are_taken(named) -> None:
    data = open_data(None, named(lambda: Named(KINDS["array"], [2, 1] * 5)))
    assert (len(data.train), len(data.test), data.train.classes) == (9, 1, ("cat", "dog", "cow"))
    assert set(data.train.labels.tolist()) == {1, 2}
    assert data.notes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 3, "return a Dataset, or a pair of them"),
        (
            lambda: Images(KINDS["array"], ["cat"]),
            "labels are <U3 of shape .*: give one whole number per image; return a Dataset",
        ),
        (lambda: 1 / 0, "mydata:make: division by zero"),
        (
            lambda: Images(lambda pixels: torch.randn(3, 4, 4)),
            "floats outside .0, 1.: leave normalization to the model",
        ),
        (lambda: Images(lambda pixels: torch.full((3, 4, 4), 300)), "no image: it must be"),
        (lambda: Images(lambda pixels: torch.rand(3, 4, 4)), "another one each time: leave augmentation to the"),
        (lambda: Images(lambda pixels: torch.full((3, 4, 4), torch.nan)), "floats outside"),
        (lambda: Images(lambda pixels: pixels.transpose(2, 0, 1)), "no image: .* an .H, W, C. array"),
        (lambda: Images(torch.from_numpy), "no image: .* a .C, H, W. tensor"),
    ],
)
def test_something_else_is_refused_in_one_line(named, make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_data(None, named(make)).train.image(0)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # A target_transform of torchvision changes the items only.
        (lambda: Named(KINDS["array"], [2, 1] * 4 + [2, 0]), r"train\[9\] has two labels, 0 as an item, 1 in targets"),
        (
            lambda: Images(KINDS["array"], [0, 1.9] * 5),
            "labels are float64 of shape .*: give one whole number per image",
        ),
        (
            lambda: (Named(KINDS["array"], [2, 1] * 5), Other(KINDS["array"], [2, 1] * 5)),
            "training and test images have other classes: give both the same",
        ),
    ],
)
def test_labels_that_contradict_each_other_are_refused(named, make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_data(None, named(make), damaged="skip")


def test_an_item_that_fails_is_named(named) -> None:
    data = open_data(None, named(lambda: Some(3)))
    with pytest.raises(ValueError, match=r"mydata:make train\[3\]: no image: it must be .*; repair the data"):
        Stream(data.train, 9, 9, 0, augmentation("none")).chunk(0, 0)


def test_what_one_dataset_has_damaged_is_not_remembered_for_another(named) -> None:
    for wrong in (0, 3):
        assert len(open_data(None, named(lambda wrong=wrong: Some(wrong)), damaged="skip").skipped) == 1
    assert open_data(None, named(lambda: Some(None)), damaged="skip").skipped == ()


def test_a_path_with_a_colon_is_a_path_and_unknown_code_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or directory"):
        open_data(None, tmp_path / "a:b")
    with pytest.raises(ValueError, match="cannot import 'nowhere' of 'nowhere:make'"):
        open_data(None, "nowhere:make")


def test_names_of_classes_come_from_the_features(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_table(tmp_path / f"{part}.parquet", SAMPLES, ["cat", "dog"])
    data = open_data(None, f"hf:{tmp_path}")
    assert data.train.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [label for _, label in SAMPLES]
    assert data.train.name(3) == f"hf:{tmp_path} train[3]"


def test_what_save_to_disk_wrote_is_read_and_validation_goes_before_test(tmp_path: Path) -> None:
    rows = {"img": [{"bytes": data, "path": None} for data, _ in SAMPLES], "fine_label": [0, 1, 2, 0, 1, 2]}
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b", "c"])})
    split = datasets.Dataset.from_dict(rows, features=features)
    parts = {"train": split, "test": split.select([0]), "validation": split.select([1, 2])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    data = open_data(None, f"hf:{tmp_path / 'saved'}")
    assert (len(data.train), data.test.labels.tolist(), data.test.classes) == (6, [1, 2], ("a", "b", "c"))


def test_rows_without_an_image_or_a_label_are_named(tmp_path: Path) -> None:
    write_table(tmp_path / "test.parquet", SAMPLES)
    write_table(tmp_path / "train.parquet", [*SAMPLES, (None, 0)])
    with pytest.raises(DamagedError, match=r"train\[6\]: no image"):
        open_data(None, f"hf:{tmp_path}").train.image(6)
    write_table(tmp_path / "train.parquet", [*SAMPLES, (SAMPLES[0][0], None)])
    with pytest.raises(ValueError, match=r"train\[6\] has label -1, but the 2 classes are numbered 0 to 1"):
        open_data(None, f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "label": [0]}, "its columns are text, label; it needs an image and a label"),
        ({"image": [b"a"], "label": ["cat"]}, "labels are <U3 of shape .*: give one whole number per image"),
        ({"image": [3], "label": [0]}, "hf:"),
    ],
)
def test_tables_of_something_else_are_refused(tmp_path: Path, columns: dict[str, list[object]], message: str) -> None:
    for part in ("train", "test"):
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
    with pytest.raises(ValueError, match=message) as caught:
        open_data(None, f"hf:{tmp_path}")
    assert str(caught.value).isprintable()


def test_a_missing_split_or_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    write_table(tmp_path / "other.parquet", SAMPLES)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.parquet").write_bytes(b"PAR1 and no more")
    for path in (tmp_path / "bad", tmp_path / "missing"):
        with pytest.raises(ValueError, match=f"^hf:{path}: ") as caught:
            open_data(None, f"hf:{path}")
        assert str(caught.value).isprintable()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:x: it needs the datasets library: pip install 'conadv\[hf\]'"):
        open_data(None, "hf:x")
