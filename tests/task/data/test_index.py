"""The index that one rank sends to the others: the same data set below another path, without a walk to find it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from conadv.task.data import DataSet, open_data
from conadv.task.data.index import pack_index, unpack_index
from task.data.samples import jpeg_set, write_folder, write_shards_by_hand
from task.data.test_cifar import files_of, write_archive
from task.data.test_open import TEST, TRAIN, write_arrays

Samples = list[tuple[bytes, int]]


def write_npz(root: Path, train: Samples, test: Samples) -> Path:
    path = root.with_suffix(".npz")
    np.savez(path, **{file.stem: np.load(file) for file in write_arrays(root, train, test).iterdir()})
    shutil.rmtree(root)
    return path


FILES = {"folder": write_folder, "shards": write_shards_by_hand}
WRITERS = {**FILES, "npy": write_arrays, "npz": write_npz}


def names(data: DataSet, root: Path) -> list[str]:
    return [source.name(i).removeprefix(f"{root}/") for source in (data.train, data.test) for i in range(len(source))]


def assert_same(own: DataSet, root: Path, other: DataSet, elsewhere: Path) -> None:
    assert names(own, root) == names(other, elsewhere)
    assert own.train.classes == other.train.classes == other.test.classes
    for mine, theirs in ((own.train, other.train), (own.test, other.test)):
        assert np.array_equal(mine.labels, theirs.labels)
        assert all(np.array_equal(mine.image(index), theirs.image(index)) for index in range(len(mine)))


@pytest.mark.parametrize("kind", WRITERS)
def test_the_index_opens_the_same_images_elsewhere(kind: str, tmp_path: Path) -> None:
    root = WRITERS[kind](tmp_path / "toy", TRAIN, TEST)
    data = open_data("path", root)
    packed = pack_index(data, root)
    elsewhere = root.rename(tmp_path / f"moved{root.suffix}")  # so that nothing can be read where it was
    other = unpack_index(packed, elsewhere, channels=3)
    assert other.name == "toy"
    (shutil.copytree if elsewhere.is_dir() else shutil.copy)(elsewhere, root)
    assert_same(data, root, other, elsewhere)


@pytest.mark.parametrize("kind", FILES)
def test_damaged_images_are_left_out_of_the_index_and_named(kind: str, tmp_path: Path) -> None:
    damaged = [(b"no image", 0), *TRAIN]
    root = FILES[kind](tmp_path / "toy", damaged, TEST)
    data = open_data("path", root, damaged="skip")
    other = unpack_index(pack_index(data, root), root, channels=3)
    assert [str(problem) for problem in other.skipped] == [str(problem) for problem in data.skipped]
    assert len(other.skipped) == 1
    assert_same(data, root, other, root)


def test_a_path_within_the_working_folder_keeps_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, TRAIN, TEST)
    monkeypatch.chdir(tmp_path)
    data = open_data("path", ".")
    other = unpack_index(pack_index(data, Path()), Path(), channels=3)
    assert other.train.name(0) == data.train.name(0) == "train/class0/0000.JPEG"


def test_files_that_hold_labels_and_pixels_at_once_have_no_index(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "cifar.tar", files_of("10-bin")[0])
    assert pack_index(open_data("path", path), path) == b""


def test_the_index_of_imagenet_is_small(tmp_path: Path) -> None:
    """Names are most of it, and alike: compressed, fewer bytes per image than its name has."""
    root = write_folder(tmp_path / "toy", jpeg_set(400, height=2, width=2), TEST)
    assert len(pack_index(open_data("path", root), root)) < 400 * len("train/class0/0000.JPEG")


@pytest.mark.parametrize("train_size", [None, 5])
def test_every_process_gets_what_one_of_them_lists(train_size: int | None, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "toy", TRAIN, TEST)
    sent: list[bytes] = []

    def first(work):
        sent.append(work())
        return sent[0]

    leading = open_data("path", root, train_size=train_size, share=first)
    following = open_data("path", root, train_size=train_size, share=lambda work: sent[0])
    assert len(leading.train) == (train_size or len(TRAIN))
    assert_same(leading, root, following, root)
