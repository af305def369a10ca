"""Shards written from any data set hold the same images, and the same bytes where they were encoded already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conadv.task.data import Arrays, DataSet, open_data
from conadv.task.data.write_shards import write_shards
from task.data.samples import encode, jpeg_set, picture, write_folder

TRAIN, TEST = jpeg_set(12), jpeg_set(4)


def test_encoded_images_keep_their_bytes_and_classes_their_names(tmp_path: Path) -> None:
    data = open_data("path", write_folder(tmp_path / "folder", TRAIN, TEST))
    written = write_shards(data, tmp_path / "shards", images_per_shard=5)
    assert [path.name for path in written] == [*(f"train-{n:06d}.tar" for n in range(3)), "val-000000.tar"]
    again = open_data("path", tmp_path / "shards")
    assert [again.train.encoded(i) for i in range(12)] == [content for content, _ in TRAIN]
    assert again.test.labels.tolist() == [label for _, label in TEST]
    assert again.train.classes == ("class0", "class1")


def test_writing_again_gives_the_same_files_and_no_others(tmp_path: Path) -> None:
    data = open_data("path", write_folder(tmp_path / "folder", TRAIN, TEST))
    written = write_shards(data, tmp_path / "shards", images_per_shard=5)
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_shards(data, tmp_path / "shards", images_per_shard=5)] == before
    assert len(list((tmp_path / "shards").iterdir())) == 5


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_become_png_without_loss(tmp_path: Path, channels: int) -> None:
    images = np.stack([picture(i, channels=channels) for i in range(5)])
    source = Arrays(images, np.array([0, 1, 2, 1, 0]), ("a", "b", "c"))
    write_shards(DataSet(source, source, "toy"), tmp_path / "shards")
    again = open_data("path", tmp_path / "shards", channels=channels).train
    np.testing.assert_array_equal(np.stack([again.image(i) for i in range(5)]), images)
    assert again.name(0).endswith("train-000000.tar/000000000.png")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_members_are_named_by_what_they_hold(tmp_path: Path, form: str) -> None:
    samples = [(encode(picture(i), form), i % 2) for i in range(2)]
    write_shards(open_data("path", write_folder(tmp_path / "folder", samples, samples)), tmp_path / "shards")
    suffix = {"JPEG": "jpg"}.get(form, form.lower())
    assert open_data("path", tmp_path / "shards").train.name(1).endswith(f".{suffix}")


def test_empty_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 images per shard"):
        write_shards(open_data("digits"), tmp_path, images_per_shard=0)
