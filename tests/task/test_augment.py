"""Augmentations by name, their views and shapes; random crops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conadv.task.augment import AUGMENTATIONS, DRAWS, augmentation, random_box, random_crop, shifted
from conadv.task.data import Arrays, Source
from conadv.task.data.fit import fitted
from conadv.task.data.source import Picture
from conadv.task.draws import mix_all, uniforms

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 32, 40, 3), dtype=np.uint8)
SOURCE = Source(Arrays(IMAGES), np.arange(6), tuple("abcdef"))
INDICES, SEEDS = np.array([4, 0, 3]), mix_all(5, np.arange(3))


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("size", [16, None])
def test_every_augmentation_has_a_shape_and_an_evaluation(name: str, size: int | None) -> None:
    own = (3, 224, 224) if name in ("resized-crop", "autoaugment-imagenet") else (3, 32, 40)
    shape = own if size is None else (3, size, size)
    augment = augmentation(name, size)
    assert augment.shape(SOURCE) == shape
    (images,) = augment(SOURCE, INDICES, SEEDS)
    assert images.shape == (3, *shape)
    assert fitted(SOURCE, INDICES, augment.fit).shape == (3, *shape)


@pytest.mark.parametrize("name", [name for name in AUGMENTATIONS if name != "none"])
def test_seeds_decide_alone(name: str) -> None:
    augment = augmentation(name, 16)
    first, again, other = (augment(SOURCE, INDICES, seeds)[0] for seeds in (SEEDS, SEEDS, SEEDS + np.uint64(1)))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(augment(SOURCE, INDICES[1:], SEEDS[1:])[0], first[1:])


@pytest.mark.parametrize(
    ("name", "below"), [("autoaugment-cifar10", "crop-flip"), ("autoaugment-imagenet", "resized-crop")]
)
def test_a_policy_works_on_top_of_the_same_crops(name: str, below: str) -> None:
    clean, augmented = augmentation(name, 16, three_views=True)(SOURCE, INDICES, SEEDS)
    (cropped,) = augmentation(below, 16)(SOURCE, INDICES, SEEDS)
    (alone,) = augmentation(name, 16)(SOURCE, INDICES, SEEDS)
    np.testing.assert_array_equal(clean, cropped)
    np.testing.assert_array_equal(augmented, alone)
    assert not np.array_equal(clean, augmented)


def test_without_a_policy_the_clean_view_is_that_of_evaluation() -> None:
    clean, augmented = augmentation("crop-flip", 16, three_views=True)(SOURCE, INDICES, SEEDS)
    np.testing.assert_array_equal(clean, fitted(SOURCE, INDICES, augmentation("crop-flip", 16).fit))
    np.testing.assert_array_equal(augmented, augmentation("crop-flip", 16)(SOURCE, INDICES, SEEDS)[0])


MANY = mix_all(7, np.arange(4000))


@pytest.mark.parametrize("shape", [(16, 3, 32, 32), (5, 1, 16, 24), (3, 2, 9, 40), (1, 3, 7, 7)])
@pytest.mark.parametrize("flip", [True, False])
def test_a_chunk_is_shifted_as_its_images_one_by_one(shape: tuple[int, ...], flip: bool) -> None:
    """The draws of an image are its own, so that its place in a chunk changes nothing."""
    count, _, height, width = shape
    images, seeds = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8), MANY[:count]
    moved = shifted(images, seeds, flip)
    for image, draws, ours in zip(images, uniforms(seeds, 3), moved, strict=True):
        canvas = np.pad(image, ((0, 0), (height // 8,) * 2, (width // 8,) * 2))
        top, left = int(draws[0] * (2 * (height // 8) + 1)), int(draws[1] * (2 * (width // 8) + 1))
        crop = canvas[:, top : top + height, left : left + width]
        np.testing.assert_array_equal(ours, np.flip(crop, axis=2) if flip and draws[2] < 0.5 else crop)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 2**60))
def test_a_box_lies_in_the_image(height: int, width: int, seed: int) -> None:
    left, top, right, bottom = random_box(height, width, uniforms(mix_all(seed), DRAWS - 1)[0])
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_boxes_have_the_areas_and_ratios_that_they_should() -> None:
    """In a square no draw of a moderate area is refused, so that areas are uniform there."""
    boxes = [random_box(1000, 1000, row) for row in uniforms(MANY, DRAWS - 1)]
    widths, heights = (np.array([box[side + 2] - box[side] for box in boxes]) for side in (0, 1))
    areas, ratios = widths * heights / 1e6, widths / heights
    assert 0.079 < areas.min() < 0.09
    assert areas.max() > 0.98
    assert 3 / 4 - 0.01 < ratios.min() < ratios.max() < 4 / 3 + 0.01
    below, above = (areas < 0.4).sum(), ((areas >= 0.4) & (areas < 0.72)).sum()
    assert abs(below - above) < 5 * np.sqrt(below + above)
    assert abs(np.log(ratios).mean()) < 5 * np.log(4 / 3) / np.sqrt(3 * 4000)
    lefts = np.array([box[0] for box in boxes])[widths < 500]
    spare = 1000 - widths[widths < 500]
    assert abs((lefts / spare).mean() - 0.5) < 5 * 0.29 / np.sqrt(len(lefts))


@pytest.mark.parametrize(
    ("height", "width", "box"), [(10, 1000, (493, 0, 506, 10)), (1000, 10, (0, 493, 10, 506)), (1, 1, (0, 0, 1, 1))]
)
def test_a_long_thin_image_gives_its_centre(height: int, width: int, box: tuple[int, ...]) -> None:
    assert random_box(height, width, uniforms(MANY[:1], DRAWS - 1)[0]) == box


def test_a_crop_is_the_box_resized_and_perhaps_flipped() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    flips = 0
    for draws in uniforms(MANY[:30], DRAWS):
        ours = random_crop(Picture(90, 120, lambda shrink: pixels), 32, draws)
        box = random_box(90, 120, draws[1:])
        oracle = Image.fromarray(pixels).crop(box).resize((32, 32), Image.Resampling.BILINEAR)
        if draws[0] < 0.5:
            flips += 1
            oracle = oracle.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert np.abs(ours.transpose(1, 2, 0).astype(int) - np.asarray(oracle)).max() <= 1
    assert 5 < flips < 25
