"""Formats are detected; the same images give the same stream in every format; damaged images stop or are skipped."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conadv.task.augment import augmentation
from conadv.task.data import DataSet, Fit, Stream, evaluation_batches, open_data
from conadv.task.data.open import find_data
from conadv.task.data.write_shards import write_shards
from task.data.samples import encode, jpeg_set, picture, write_folder, write_hub, write_shards_by_hand
from task.data.test_cifar import files_of

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
    found = find_data(Path(WRITERS[kind](tmp_path / "toy", TRAIN, TEST)))
    assert found.kind == kind
    assert (len(found.data.train), len(found.data.test), len(found.data.train.classes)) == (12, 4, 2)
    assert found.data.name == "toy"


def test_cifar_is_recognized(tmp_path: Path) -> None:
    for name, content in files_of("10-py")[0].items():
        (tmp_path / name).write_bytes(content)
    assert find_data(tmp_path).kind == "CIFAR's own files"


@pytest.mark.parametrize("size", [16, None])
@pytest.mark.parametrize("augment", ["none", "crop-flip", "resized-crop", "autoaugment-imagenet"])
def test_every_form_of_the_same_images_gives_bitwise_the_same_stream(
    tmp_path: Path, augment: str, size: int | None
) -> None:
    streams = {
        kind: stream_of(open_data("path", write(tmp_path / kind, TRAIN, TEST)), augment, workers, size)
        for workers, (kind, write) in enumerate(WRITERS.items())
    }
    rewritten = open_data("path", tmp_path / "NumPy arrays")
    write_shards(rewritten, tmp_path / "png shards", images_per_shard=5)
    streams["shards of PNG"] = stream_of(open_data("path", tmp_path / "png shards"), augment, size=size)
    first = streams.pop("image folder")
    for kind, stream in streams.items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(stream, first, strict=True)), kind


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_larger_than_needed_is_shrunk_while_decoded_to_nearly_the_same(tmp_path: Path, workers: int) -> None:
    """A JPEG decoded at a fraction of its size is not the same bytes, but looks the same."""
    large = jpeg_set(4, height=160, width=200)
    streams = [
        stream_of(open_data("path", write(tmp_path / kind, large, large)), "resized-crop", workers)
        for kind, write in WRITERS.items()
        if kind in ("tar shards", "NumPy arrays")
    ]
    for ours, exact in zip(*streams, strict=True):
        assert (ours.float() - exact.float()).abs().mean() < 4


def test_grey_folders_can_stay_grey(tmp_path: Path) -> None:
    samples = [(encode(picture(i, channels=1), "PNG"), i % 2) for i in range(4)]
    write_folder(tmp_path / "grey", samples, samples)
    grey, colour = (open_data("path", tmp_path / "grey", channels=channels).train.image(0) for channels in (1, 3))
    assert (grey.shape, colour.shape) == ((12, 16, 1), (12, 16, 3))
    with pytest.raises(ValueError, match="channels 4: choose 1"):
        open_data("path", tmp_path / "grey", channels=4)


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
        open_data("path", spoil(tmp_path / "bad"))
    (tmp_path / "bad" / "train" / "class2").rmdir()
    stream = Stream(open_data("path", tmp_path / "bad").train, 4, 2, 0, augmentation("none"), workers=2)
    with pytest.raises(ValueError, match=r"class0/0001\.JPEG: .*; repair the data, or leave out what is damaged"):
        read(stream)
    with pytest.raises(ValueError, match=r"val/class1/notes\.jpg: .*; repair the data, or leave out"):
        list(evaluation_batches(open_data("path", tmp_path / "bad").test, 2, Fit(16), workers=1))


def test_skipped_images_are_named_and_the_rest_keeps_the_promise(tmp_path: Path) -> None:
    data = open_data("path", spoil(tmp_path / "bad"), damaged="skip")
    assert sorted(Path(problem.name).name for problem in data.skipped) == ["0001.JPEG", "class2", "notes.jpg"]
    assert (len(data.train), len(data.test)) == (11, 4)
    healthy = [sample for place, sample in enumerate(TRAIN) if place != 1]
    expected = open_data("path", write_folder(tmp_path / "good", healthy, TEST))
    for ours, theirs in zip(stream_of(data, "crop-flip", workers=2), stream_of(expected, "crop-flip"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_search_for_damage_is_done_once_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = spoil(tmp_path / "bad")
    open_data("path", root, damaged="skip")
    with monkeypatch.context() as patch:
        patch.setattr("conadv.task.data.scan._decode", None)  # whoever decodes now fails
        assert len(open_data("path", root, damaged="skip").skipped) == 3
    (root / "val" / "class1" / "notes.jpg").unlink()
    assert len(open_data("path", root, damaged="skip").skipped) == 2


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "bad", [(b"text", 0)] * 3, TEST[:1])
    with pytest.raises(ValueError, match="bad: no training images that can be used"):
        open_data("path", tmp_path / "bad", damaged="skip")


def test_a_part_of_the_training_images(tmp_path: Path) -> None:
    data = open_data("path", write_folder(tmp_path / "toy", TRAIN, TEST), train_size=5)
    assert sorted(np.bincount(data.train.labels).tolist()) == [2, 3]
    assert len(data.test) == 4
    with pytest.raises(ValueError, match="train_size 13: choose 1 to 12"):
        open_data("path", tmp_path / "toy", train_size=13)


def test_embedded_data_by_name() -> None:
    assert len(open_data("digits", train_size=100).train) == 100
    data = open_data("synthetic", train_size=30, image_size=5, channels=2, classes=4)
    assert (len(data.train), data.train.image(0).shape, len(data.train.classes)) == (30, (5, 5, 2), 4)


def test_what_is_not_recognized_is_told_what_would_be(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "file.txt"):
        with pytest.raises(ValueError, match="not recognized; it can be an image folder"):
            open_data("path", path)
    with pytest.raises(
        ValueError, match=r"missing': no such .* directory; pass the path .* \(conadv train: --data.path\)$"
    ):
        open_data("path", tmp_path / "missing")
    with pytest.raises(ValueError, match="data 'mnist': choose digits, synthetic, or path"):
        open_data("mnist")


def test_class_folders_without_train_and_val_are_told_where_to_go(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.JPG").write_bytes(b"")
    with pytest.raises(ValueError, match=r"none called train and val; move the class folders to train/CLASS"):
        open_data("path", tmp_path)
