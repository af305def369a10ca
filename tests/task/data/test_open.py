"""Formats are detected; the same images give the same stream in every format; damaged images stop or are skipped."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conadv.task.augment import augmentation
from conadv.task.data import DataSet, Fit, open_data
from conadv.task.data.open import find_data
from conadv.task.stream import Stream, evaluation_batches
from task.data.samples import (
    cifar,
    encode,
    jpeg_set,
    members_of,
    picture,
    write_archive,
    write_folder,
    write_hub,
    write_shards_by_hand,
    write_tar,
)

TRAIN, TEST = jpeg_set(12, height=20, width=24), jpeg_set(4, height=20, width=24)


def write_arrays(root: Path, train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> Path:
    """The pixels as Pillow decodes them."""
    root.mkdir()
    for part, samples in (("train", train), ("test", test)):
        np.save(root / f"{part}_images.npy", np.stack([np.asarray(Image.open(BytesIO(data))) for data, _ in samples]))
        np.save(root / f"{part}_labels.npy", [label for _, label in samples])
    return root


WRITERS = {
    "image folder": write_folder,
    "tar shards": write_shards_by_hand,
    "Hugging Face": write_hub,
    "NumPy arrays": write_arrays,
}


def stream_of(data: DataSet, name: str, workers: int = 0, size: int | None = 16) -> list[torch.Tensor]:
    stream = Stream(data.train, 4, 2, seed=3, augment=augmentation(name, size), workers=workers)
    return read(stream)


def read(stream: Stream) -> list[torch.Tensor]:
    return [part for batch in stream.batches(0, 6) for chunk in batch.chunks for part in chunk]


@pytest.mark.parametrize("kind", WRITERS)
def test_forms_are_recognized(tmp_path: Path, kind: str) -> None:
    found, data = find_data(WRITERS[kind](tmp_path / "toy", TRAIN, TEST))
    assert (found, data.name) == (kind, "toy")
    assert (len(data.train), len(data.test), len(data.train.classes)) == (12, 4, 2)
    if kind == "image folder":
        assert find_data(write_archive(tmp_path / "c.tar", cifar(10)[0]))[0] == "CIFAR's own files"


def test_grey_folders_can_stay_grey(tmp_path: Path) -> None:
    samples = [(encode(picture(i, channels=1), "PNG"), i % 2) for i in range(4)]
    write_folder(tmp_path / "grey", samples, samples)
    grey, colour = (open_data(None, tmp_path / "grey", channels=channels).train.image(0) for channels in (1, 3))
    assert (grey.shape, colour.shape) == ((12, 16, 1), (12, 16, 3))
    with pytest.raises(ValueError, match="channels 4: choose 1"):
        open_data(None, tmp_path / "grey", channels=4)
    assert len(open_data(None, write_arrays(tmp_path / "arrays", TRAIN, TEST), channels=4).train) == 12


def spoil(root: Path) -> Path:
    """A folder with a truncated JPEG, a text file with an image's name, and an empty class."""
    write_folder(root, TRAIN, TEST)
    names = sorted((root / "train" / "class0").iterdir())
    names[1].write_bytes(names[1].read_bytes()[:300])
    (root / "val" / "class1" / "notes.jpg").write_text("not an image")
    (root / "train" / "class2").mkdir()
    return root


def test_damage_is_fatal_and_named_by_default(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"class2: a class without images; repair the data, or leave out what is damaged"
    ):
        open_data(None, spoil(tmp_path / "bad"))
    (tmp_path / "bad" / "train" / "class2").rmdir()
    stream = Stream(open_data(None, tmp_path / "bad").train, 4, 2, 0, augmentation("none"), workers=2)
    with pytest.raises(ValueError, match=r"class0/0001\.JPEG: .*; repair the data, or leave out what is damaged"):
        read(stream)
    with pytest.raises(ValueError, match=r"val/class1/notes\.jpg: .*; repair the data, or leave out"):
        list(evaluation_batches(open_data(None, tmp_path / "bad").test, 2, Fit(16), workers=1))


def test_skipped_images_are_named_and_the_rest_keeps_the_promise(tmp_path: Path) -> None:
    data = open_data(None, spoil(tmp_path / "bad"), damaged="skip")
    assert sorted(Path(problem.name).name for problem in data.skipped) == ["0001.JPEG", "class2", "notes.jpg"]
    assert (len(data.train), len(data.test)) == (11, 4)
    healthy = [sample for place, sample in enumerate(TRAIN) if place != 1]
    expected = open_data(None, write_folder(tmp_path / "good", healthy, TEST))
    for ours, theirs in zip(stream_of(data, "crop-flip", workers=2), stream_of(expected, "crop-flip"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_search_for_damage_is_done_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = spoil(tmp_path / "bad")
    open_data(None, root, damaged="skip")
    with monkeypatch.context() as patch:
        patch.setattr("conadv.task.data.decode._open", None)  # whoever decodes now fails
        patch.setattr("conadv.task.data.open.ordered_map", None)
        assert len(open_data(None, root, damaged="skip").skipped) == 3
    (root / "val" / "class1" / "notes.jpg").unlink()
    assert len(open_data(None, root, damaged="skip").skipped) == 2


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "bad", [(b"text", 0)] * 3, TEST[:1])
    with pytest.raises(ValueError, match=r"bad: no training images that can be used \(.*0\.JPEG: not an image of"):
        open_data(None, tmp_path / "bad", damaged="skip")


def test_a_part_of_the_training_images(tmp_path: Path) -> None:
    data = open_data(None, write_folder(tmp_path / "toy", TRAIN, TEST), train_size=5)
    assert sorted(np.bincount(data.train.labels).tolist()) == [2, 3]
    assert len(data.test) == 4
    with pytest.raises(ValueError, match="train_size 13: choose 1 to 12"):
        open_data(None, tmp_path / "toy", train_size=13)


def test_embedded_data_by_name() -> None:
    assert [len(open_data("digits", train_size=size).train) for size in (None, 100)] == [1437, 100]
    data = open_data("synthetic", train_size=30, image_size=5, channels=2)
    assert (len(data.train), data.train.image(0).shape, len(data.train.classes)) == (30, (5, 5, 2), 10)


def test_what_is_not_recognized_is_told_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "file.txt"):
        with pytest.raises(ValueError, match="not recognized; it can be an image folder"):
            open_data(None, path)
    with pytest.raises(
        ValueError, match=r"missing: no such .* directory; pass the path .* \(conadv train: --data.path\)$"
    ):
        open_data(None, tmp_path / "missing")


def test_class_folders_need_no_train_above_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "split", jpeg_set(40), [])
    above, below = open_data(None, tmp_path / "split"), open_data(None, tmp_path / "split" / "train")
    assert below.notes == above.notes and below.train.classes == above.train.classes
    assert below.train.labels.tolist() == above.train.labels.tolist()
    assert below.test.labels.tolist() == above.test.labels.tolist()


def test_images_to_test_on_need_a_folder_called_train(tmp_path: Path) -> None:
    for name in ("val", "cat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.JPG").write_bytes(b"")
    with pytest.raises(ValueError, match="no folder called train; put the class folders in train/CLASS"):
        open_data(None, tmp_path)


@pytest.mark.parametrize("kind", WRITERS)
def test_without_test_images_a_tenth_is_held_out_and_one_line_says_so(tmp_path: Path, kind: str) -> None:
    samples = jpeg_set(40)
    place = WRITERS[kind](tmp_path / "toy", samples, samples[:1])
    for left in ("val", "data/test-00000-of-00001.parquet", "toy-val-0.tar", "test_images.npy", "test_labels.npy"):
        path = tmp_path / "toy" / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    data, again = (open_data(None, place) for _ in range(2))
    assert data.notes == ("no test images: 4 of the 40 training images, a tenth, are held out to test on",)
    assert [np.bincount(part.labels).tolist() for part in (data.train, data.test)] == [[18, 18], [2, 2]]
    names = [[part.name(i) for i in range(len(part))] for part in (data.train, data.test, again.test)]
    assert not set(names[0]) & set(names[1])
    assert names[1] == names[2]


@pytest.mark.parametrize(
    ("files", "train", "test"),
    [
        (["x-val-0", "x-train-1", "x-train-0"], ["x-train-0", "x-train-1"], ["x-val-0"]),
        (["Train/0", "test/0"], ["Train/0"], ["test/0"]),
        (["train-0", "test-0", "validation-0"], ["train-0"], ["validation-0"]),  # that test has no labels
    ],
)
def test_shards_are_split_by_the_words_in_their_paths(
    tmp_path: Path, files: list[str], train: list[str], test: list[str]
) -> None:
    root = tmp_path / "training data"  # a word in the path above the data says nothing
    for file in files:
        write_tar(root / f"{file}.tar", members_of(jpeg_set(1)))
    data = open_data(None, root)
    for source, names in ((data.train, train), (data.test, test)):
        assert [source.name(i) for i in range(len(source))] == [f"{root}/{name}.tar/0000.jpg" for name in names]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("test-0", "no file has train in its name"),
        ("a", r"a\.tar: rename it, so that it has one of the words train, val, test \(now: none\)"),
        ("latest-festival-trainer", "now: none"),
        ("train-test", "now: test and train"),
    ],
)
def test_names_of_shards_that_do_not_tell_are_refused(tmp_path: Path, file: str, message: str) -> None:
    write_tar(tmp_path / f"{file}.tar", members_of(jpeg_set(1)))
    with pytest.raises(ValueError, match=message):
        open_data(None, tmp_path)
