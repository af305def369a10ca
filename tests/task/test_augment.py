"""Augmentations by name, their views and shapes."""

from __future__ import annotations

import numpy as np
import pytest

from conadv.task.augment import AUGMENTATIONS, augmentation
from conadv.task.data import Arrays, Source
from conadv.task.data.fit import fitted
from conadv.task.draws import mix_all
from conadv.task.stream import Stream

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


def test_none_changes_nothing() -> None:
    (images,) = augmentation("none")(SOURCE, INDICES, SEEDS)
    np.testing.assert_array_equal(images, IMAGES[INDICES].transpose(0, 3, 1, 2))


@pytest.mark.parametrize("name", [name for name in AUGMENTATIONS if name != "none"])
def test_seeds_decide_alone(name: str) -> None:
    augment = augmentation(name, 16)
    first, again, other = (augment(SOURCE, INDICES, seeds)[0] for seeds in (SEEDS, SEEDS, SEEDS + np.uint64(1)))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


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


def test_a_stream_of_three_views_has_images_labels_and_augmented() -> None:
    augment = augmentation("autoaugment-cifar10", 16, three_views=True)
    stream = Stream(SOURCE, 4, 2, seed=0, augment=augment)
    plain = Stream(SOURCE, 4, 2, seed=0, augment=augmentation("crop-flip", 16))
    for chunk in range(2):
        images, labels, augmented = stream.chunk(3, chunk)
        below, same = plain.chunk(3, chunk)
        assert images.equal(below)
        assert labels.equal(same)
        assert augmented.shape == images.shape
        assert augmented.is_contiguous()


def test_wrong_names_and_views_are_refused() -> None:
    with pytest.raises(ValueError, match="augmentation 'mixup': choose one of none, crop"):
        augmentation("mixup")
    with pytest.raises(ValueError, match="three views need an augmentation"):
        augmentation("none", three_views=True)
    with pytest.raises(ValueError, match="size 0"):
        augmentation("resized-crop", 0)
