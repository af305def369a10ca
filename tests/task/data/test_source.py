"""Images in memory, and what a set of labels must be."""

from __future__ import annotations

import numpy as np
import pytest

from conadv.task.data.source import Arrays, DataSet

IMAGES = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)


def test_arrays_give_their_images() -> None:
    source = Arrays(IMAGES, np.array([1, 0], np.uint8), ("cat", "dog"))
    picture = source.picture(1)
    assert (picture.height, picture.width) == (3, 4)
    np.testing.assert_array_equal(picture.pixels(shrink=2), IMAGES[1])
    assert source.labels.dtype == np.int64
    assert len(source) == 2


@pytest.mark.parametrize(("label", "name"), [(2, "2"), (-1, "-1")])
def test_a_label_outside_the_classes_is_named(label: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"image 1 has label {name}, but the 2 classes are numbered 0 to 1"):
        Arrays(IMAGES, np.array([0, label]), ("cat", "dog"))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.astype(np.float32), [0, 1], "float32"),
        (IMAGES[0], [0, 1], r"\(3, 4, 3\)"),
        (IMAGES, [0], "2 images have 1 labels"),
        (IMAGES, [0.0, 1.0], "labels are float64"),
        (IMAGES, [[0], [1]], r"shape \(2, 1\)"),
    ],
)
def test_arrays_that_are_no_images_are_refused(images: np.ndarray, labels: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrays(images, np.array(labels), ("cat", "dog"))


def test_training_and_test_images_share_their_classes() -> None:
    train = Arrays(IMAGES, np.array([0, 1]), ("cat", "dog"))
    test = Arrays(IMAGES, np.array([0, 1]), ("cat", "dog", "emu"))
    with pytest.raises(ValueError, match="different classes"):
        DataSet(train, test, "pets")
