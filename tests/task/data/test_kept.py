"""Images kept in memory are bit for bit those that would be decoded, and only as many as there is room for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conadv.config import Data, Recipe
from conadv.task.augment import AUGMENTATIONS, augmentation
from conadv.task.data import DataSet, Fit, Stream, evaluation_batches, keep, open_data
from conadv.task.data import kept as kept_module
from conadv.task.data.embedded import digits
from conadv.task.data.kept import Kept, fitted
from conadv.trainer.build import build_stream
from conadv.trainer.build_task import build_task
from task.data.samples import jpeg_set, write_folder, write_shards_by_hand

TRAIN, TEST = jpeg_set(12, height=20, width=24), jpeg_set(4, height=20, width=24)


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    return open_data("path", write_shards_by_hand(tmp_path / "toy", TRAIN, TEST))


def chunks(data: DataSet, name: str, size: int | None, workers: int, views: bool) -> list[torch.Tensor]:
    stream = Stream(data.train, 4, 2, 3, augmentation(name, size, views), workers)
    return [part for batch in stream.batches(0, 9) for chunk in batch.chunks for part in chunk]


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("size", [16, 20, None])
@pytest.mark.parametrize("workers", [0, 3])
def test_training_sees_the_same_bytes_with_and_without_memory(
    data: DataSet, name: str, size: int | None, workers: int
) -> None:
    views = name != "none"
    augment = augmentation(name, size, views)
    remembered = keep(data, augment.fit, 10, augment.looks_at_fit)
    ours, theirs = (chunks(part, name, size, workers, views) for part in (remembered, data))
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs) > 0


def test_evaluation_sees_the_same_bytes_twice(data: DataSet) -> None:
    remembered = keep(data, Fit(16), 10)
    plain = list(evaluation_batches(data.test, 3, Fit(16)))
    for _ in range(2):
        for ours, theirs in zip(evaluation_batches(remembered.test, 3, Fit(16), workers=2), plain, strict=True):
            assert all(map(torch.equal, ours, theirs))
    other = next(evaluation_batches(remembered.test, 3, Fit(12)))
    assert torch.equal(other[0], next(evaluation_batches(data.test, 3, Fit(12)))[0])


def test_an_image_is_decoded_once(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    decoded = kept_module.decoded
    source = keep(data, Fit(16), 10).train
    monkeypatch.setattr(kept_module, "decoded", lambda *rest: asked.extend(rest[1].tolist()) or decoded(*rest))
    for indices in ([3, 1], [1, 3, 5], [5, 3]):
        fitted(source, np.array(indices), Fit(16))
    assert sorted(asked) == [1, 3, 5]


def test_what_does_not_fit_is_decoded_again_and_one_line_says_so(data: DataSet) -> None:
    large = keep(data, Fit(512), 9)  # 12 × 3 × 512 × 512 bytes are exactly 9 MiB
    assert isinstance(large.train, Kept)
    assert not isinstance(large.test, Kept)
    assert large.notes == ()
    larger = keep(data, Fit(512), 8)
    assert larger.train is data.train
    assert isinstance(larger.test, Kept)
    assert larger.notes == (
        "train images are decoded in every epoch: they take 9 MiB, more than is left of data.memory 8",
    )
    assert keep(data, Fit(512), 0) == replace(data)


def test_no_more_than_half_of_the_free_memory_is_taken(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "free_memory", lambda: 2 * 12 * 3 * 16 * 16 - 2)
    assert keep(data, Fit(16), 1000).train is data.train


def test_arrays_that_are_used_as_they_are_need_no_second_place() -> None:
    data = digits(100)
    assert keep(data, Fit(), 1000) == data
    assert isinstance(keep(data, Fit(4), 1000).train, Kept)


def test_images_of_different_shapes_are_refused_as_without_memory(tmp_path: Path) -> None:
    samples = [*jpeg_set(2), (jpeg_set(1, height=9, width=9)[0][0], 1)]
    data = keep(open_data("path", write_folder(tmp_path, samples, samples)), Fit(), 10)
    for indices in ([2], [0, 2]):
        with pytest.raises(ValueError, match=r"set data\.image_size to resize them all"):
            fitted(data.train, np.array(indices), Fit())


def test_a_damaged_first_image_is_named_when_it_is_needed(tmp_path: Path) -> None:
    data = keep(open_data("path", write_folder(tmp_path, [(b"text", 0), *TRAIN], TEST)), Fit(8), 10)
    with pytest.raises(ValueError, match=r"0000\.JPEG: not an image of a known format; repair"):
        list(evaluation_batches(data.train, 4, Fit(8)))


@pytest.mark.parametrize(("memory", "expected"), [(1024, True), (0, False)])
def test_a_recipe_says_how_much_is_kept(tmp_path: Path, memory: int, expected: bool) -> None:
    root = write_folder(tmp_path, TRAIN, TEST)
    data = Data(path=str(root), image_size=16, augment="crop-flip", memory=memory)
    recipe = Recipe(batch_size=4, chunk_size=4, data=data)
    task = build_task(recipe, torch.device("cpu"))
    assert isinstance(build_stream(recipe, task).source, Kept) == expected
