"""Resizing agrees with its definition; images that stay in memory are bit for bit those that would be decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from conadv.task.augment import AUGMENTATIONS, augmentation
from conadv.task.data import DataSet, open_data
from conadv.task.data import fit as fit_module
from conadv.task.data.arrays import digits
from conadv.task.data.fit import Fit, fitted, keep, resized
from conadv.task.data.source import Picture
from conadv.task.stream import Stream, evaluation_batches
from task.data.samples import jpeg_set, picture, write_folder, write_shards_by_hand

TRAIN, TEST = jpeg_set(12, height=20, width=24), jpeg_set(4, height=20, width=24)


def held(pixels: np.ndarray) -> Picture:
    return Picture(pixels.shape[0], pixels.shape[1], lambda shrink: pixels)


def triangle(length: int, size: int) -> tuple[np.ndarray, int]:
    """The weights (size, length) of an antialiased bilinear filter, and their bits.

    By definition: a triangle around the centre of each result, as wide as a pixel of the longer grid, that sums to 1.
    Weights are whole multiples of 2**-bits that fit into 16 bits, the finest such, rounded to the nearest.
    """
    scale = length / size
    distances = np.abs(np.arange(length) + 0.5 - (np.arange(size)[:, None] + 0.5) * scale)
    weights = (1 - distances / max(scale, 1)).clip(0)
    weights /= weights.sum(axis=1, keepdims=True)
    bits = max(bits for bits in range(23) if np.floor(weights.max() * 2**bits + 0.5) < 2**15)
    return np.floor(weights * 2**bits + 0.5), bits


def resized_by_definition(plane: np.ndarray, size: int) -> np.ndarray:
    """Along each row first, rounded to a grey level (halves up), then along each column, rounded again."""
    for _ in range(2):
        weights, bits = triangle(plane.shape[1], size)
        plane = np.floor(plane @ weights.T / 2**bits + 0.5).T
    return plane


@example(41, 45, 14, 3, (0.40625, 0.0, 0.25, 0.0))
@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 60),
    st.integers(2, 60),
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 4]),
    st.tuples(*[st.floats(0, 1)] * 4),
)
def test_a_box_is_resized_as_the_filter_defines(
    height: int, width: int, size: int, channels: int, corners: tuple[float, ...]
) -> None:
    """To one grey level. (Pillow rounds alike but takes finer weights, and is rarely two levels off.)"""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    left, right = sorted((int(corners[0] * (width - 1)), int(corners[1] * (width - 1)) + 1))
    top, bottom = sorted((int(corners[2] * (height - 1)), int(corners[3] * (height - 1)) + 1))
    box = (left, top, max(right, left + 1), max(bottom, top + 1))
    ours = resized(held(pixels), box, size)
    assert ours.shape == (channels, size, size)
    for channel in range(channels):
        oracle = resized_by_definition(pixels[box[1] : box[3], box[0] : box[2], channel].astype(float), size)
        assert np.abs(ours[channel] - oracle).max() <= 1


def test_a_large_picture_is_decoded_no_finer_than_needed() -> None:
    asked = []

    def decode(shrink: int) -> np.ndarray:
        asked.append(shrink)
        return picture(0, -(-403 // shrink), -(-605 // shrink))

    for size in (404, 403, 202, 201, 101, 50, 1):
        resized(Picture(403, 605, decode), (0, 0, 605, 403), size)
    assert asked == [1, 1, 1, 2, 2, 8, 8]


def test_a_shrunken_picture_shows_the_same_part() -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, 800)[:, None, None], (800, 400, 1)).round().astype(np.uint8)

    def decode(shrink: int) -> np.ndarray:
        return ramp.reshape(800 // shrink, shrink, 400 // shrink, shrink, 1).mean(axis=(1, 3)).astype(np.uint8)

    whole = resized(held(ramp), (8, 200, 392, 700), 40)
    small = resized(Picture(800, 400, decode), (8, 200, 392, 700), 40)
    assert np.abs(whole.astype(int) - small).max() <= 2


@pytest.mark.parametrize(("height", "width"), [(30, 40), (40, 30), (36, 36)])
def test_evaluation_sees_the_centre(height: int, width: int) -> None:
    """The shorter side becomes 28, and 14 in the middle of that are looked at: half of it."""
    pixels = picture(1, height, width)
    side = min(height, width) // 2
    top, left = (height - side) // 2, (width - side) // 2
    box = (left, top, left + side, top + side)
    oracle = Image.fromarray(pixels).crop(box).resize((14, 14), Image.Resampling.BILINEAR)
    ours = Fit(14, zoom=2.0)(held(pixels))
    assert np.abs(ours.transpose(1, 2, 0).astype(int) - np.asarray(oracle)).max() <= 1


def test_images_of_the_right_size_are_left_alone() -> None:
    pixels = picture(2, 16, 16)
    for fit in (Fit(), Fit(16)):
        np.testing.assert_array_equal(fit(held(pixels)), pixels.transpose(2, 0, 1))
    assert Fit(16, zoom=1.1)(held(pixels)).shape == (3, 16, 16)
    assert not np.array_equal(Fit(16, zoom=1.1)(held(pixels)), pixels.transpose(2, 0, 1))


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    return open_data(None, write_shards_by_hand(tmp_path / "toy", TRAIN, TEST))


def chunks(data: DataSet, name: str, size: int | None, workers: int, views: bool) -> list[torch.Tensor]:
    stream = Stream(data.train, 4, 2, 3, augmentation(name, size, views), workers)
    return [part for batch in stream.batches(0, 9) for chunk in batch.chunks for part in chunk]


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize(("size", "workers"), [(16, 0), (20, 3)])
def test_training_sees_the_same_bytes_with_and_without_memory(
    data: DataSet, name: str, size: int, workers: int
) -> None:
    views = name != "none"
    augment = augmentation(name, size, views)
    remembered = keep(data, augment.fit, augment.looks_at_fit)
    ours, theirs = (chunks(part, name, size, workers, views) for part in (remembered, data))
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs) > 0


def test_evaluation_sees_the_same_bytes_twice(data: DataSet) -> None:
    remembered = keep(data, Fit(16))
    plain = list(evaluation_batches(data.test, 3, Fit(16)))
    for _ in range(2):
        for ours, theirs in zip(evaluation_batches(remembered.test, 3, Fit(16), workers=2), plain, strict=True):
            assert all(map(torch.equal, ours, theirs))
    other = next(evaluation_batches(remembered.test, 3, Fit(12)))
    assert torch.equal(other[0], next(evaluation_batches(data.test, 3, Fit(12)))[0])


def test_an_image_is_decoded_once(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    decoded = fit_module._decoded
    source = keep(data, Fit(16)).train
    monkeypatch.setattr(fit_module, "_decoded", lambda *rest: asked.extend(rest[1].tolist()) or decoded(*rest))
    for indices in ([3, 1], [1, 3, 5], [5, 3]):
        fitted(source, np.array(indices), Fit(16))
    assert sorted(asked) == [1, 3, 5]


def test_what_does_not_fit_is_decoded_again_and_one_line_says_so(data: DataSet) -> None:
    large = keep(data, Fit(512), room=9 * 2**20)  # 12 × 3 × 512 × 512 bytes are exactly 9 MiB
    assert (large.train.kept is None, large.test.kept is None, large.notes) == (False, True, ())
    larger = keep(data, Fit(512), room=8 * 2**20)
    assert (larger.train.kept is None, larger.test.kept is None) == (True, False)
    assert larger.notes == ("train images are decoded in every epoch: they take 9 MiB, more than the 8 MiB for them",)


def test_no_more_than_half_of_the_free_memory_is_taken(data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "free_memory", lambda: 2 * 12 * 3 * 16 * 16 - 2)
    assert keep(data, Fit(16)).train.kept is None


def test_arrays_that_are_used_as_they_are_need_no_second_place() -> None:
    assert keep(digits(100), Fit()).train.kept is None
    assert keep(digits(100), Fit(4)).train.kept is not None


def test_images_of_different_shapes_are_refused_as_without_memory(tmp_path: Path) -> None:
    samples = [*jpeg_set(2), (jpeg_set(1, height=9, width=9)[0][0], 1)]
    data = keep(open_data(None, write_folder(tmp_path, samples, samples)), Fit())
    for indices in ([2], [0, 2]):
        with pytest.raises(ValueError, match=r"set data\.image_size to resize them all"):
            fitted(data.train, np.array(indices), Fit())


def test_a_damaged_first_image_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0000\.JPEG: not an image of a known format"):
        keep(open_data(None, write_folder(tmp_path, [(b"text", 0), *TRAIN], TEST)), Fit(8))
