"""The embedded digits are scikit-learn's, split once and for all; synthetic images are cheap and distinct."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from conadv.task.data.embedded import digits, synthetic
from conadv.task.data.source import Source


def rows(source: Source) -> np.ndarray:
    return np.concatenate([source.images.reshape(len(source), -1), source.labels[:, None]], axis=1)


def test_the_digits_are_those_of_scikit_learn() -> None:
    oracle = load_digits()
    data = digits(train_size=100)
    ours = np.concatenate([rows(data.train), rows(data.test)])
    expected = np.concatenate([np.rint(oracle.data * (255 / 16)), oracle.target[:, None]], axis=1)
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], expected[np.lexsort(expected.T)].astype(ours.dtype))


@pytest.mark.parametrize("train_size", [10, 100, 105, 1437, 1796])
def test_the_split_is_stratified(train_size: int) -> None:
    data = digits(train_size)
    counts = np.bincount(data.train.labels, minlength=10)
    assert len(data.train) == train_size
    assert len(data.test) == 1797 - train_size
    if train_size < 1740:  # ten times the rarest digit, which then has none left to give
        assert counts.max() - counts.min() <= 1


def test_a_hundred_digits_are_ten_a_class_and_part_of_any_larger_split() -> None:
    small, large = rows(digits(100).train), rows(digits(1000).train)
    assert np.bincount(digits(100).train.labels).tolist() == [10] * 10
    assert {tuple(row) for row in small} <= {tuple(row) for row in large}


@pytest.mark.parametrize("train_size", [-1, 0, 9, 1797])
def test_a_split_that_leaves_nothing_is_refused(train_size: int) -> None:
    with pytest.raises(ValueError, match=f"train_size {train_size}: choose 10 to 1796"):
        digits(train_size)


def test_synthetic_images_have_any_shape_and_differ() -> None:
    data = synthetic(shape=(5, 7, 2), classes=3, count=50)
    assert data.train.image(49).shape == (5, 7, 2)
    assert len(data.test) == 5
    assert len({image.tobytes() for image in data.train.images} | {i.tobytes() for i in data.test.images}) == 55
    np.testing.assert_array_equal(data.train.labels, np.arange(50) % 3)


def test_synthetic_imagenet_takes_little_memory() -> None:
    train = synthetic(shape=(224, 224, 3), classes=1000, count=1_281_167).train
    last = train.image(1_281_166)
    assert last.tobytes()[:-1] == train.image(1_281_165).tobytes()[1:]
    assert 120 < last.mean() < 135


def test_synthetic_data_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="choose 1 or more"):
        synthetic(count=0)
