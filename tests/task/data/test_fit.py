"""Resizing agrees with Pillow's; evaluation sees the centre."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conadv.task.data.fit import Fit, decoded, resized
from conadv.task.data.source import Arrays, Picture
from task.data.samples import picture


def held(pixels: np.ndarray) -> Picture:
    return Picture(pixels.shape[0], pixels.shape[1], lambda shrink: pixels)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 60),
    st.integers(2, 60),
    st.integers(1, 40),
    st.sampled_from([1, 2, 3, 4]),
    st.tuples(*[st.floats(0, 1)] * 4),
)
def test_a_box_is_resized_as_pillow_does(
    height: int, width: int, size: int, channels: int, corners: tuple[float, ...]
) -> None:
    """To a grey level: both round twice, but not always the same way."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    left, right = sorted((int(corners[0] * (width - 1)), int(corners[1] * (width - 1)) + 1))
    top, bottom = sorted((int(corners[2] * (height - 1)), int(corners[3] * (height - 1)) + 1))
    box = (left, top, max(right, left + 1), max(bottom, top + 1))
    ours = resized(held(pixels), box, size)
    assert ours.shape == (channels, size, size)
    for channel in range(channels):
        oracle = Image.fromarray(pixels[..., channel]).crop(box).resize((size, size), Image.Resampling.BILINEAR)
        assert np.abs(ours[channel].astype(int) - np.asarray(oracle)).max() <= 1


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


def test_arrays_are_brought_to_a_size() -> None:
    source = Arrays(np.stack([picture(i) for i in range(3)]), np.zeros(3, int), ("a",))
    images = decoded(source, np.array([2, 0]), Fit(8))
    assert images.shape == (2, 3, 8, 8)
    np.testing.assert_array_equal(images[1], Fit(8)(source.picture(0)))


def test_images_of_different_sizes_need_a_size() -> None:
    class Mixed:
        classes, labels = ("a",), np.zeros(2, np.int64)

        def name(self, index: int) -> str:
            return f"{index}.jpg"

        def picture(self, index: int) -> Picture:
            return held(picture(0, 10, 10 + index))

    with pytest.raises(ValueError, match=r"1\.jpg .*\(3, 10, 11\) and 0\.jpg .*: set data\.image_size"):
        decoded(Mixed(), np.array([0, 1]), Fit())
    assert decoded(Mixed(), np.array([0, 1]), Fit(10)).shape == (2, 3, 10, 10)


def test_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size 0"):
        Fit(0)
