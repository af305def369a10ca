"""Encoded images: decoded on demand, named in every error."""

from __future__ import annotations

import numpy as np
import pytest

from conadv.task.data.encoded import Encoded, Listing, numbered_classes
from conadv.task.data.source import DamagedError
from task.data.samples import Held, encode, picture

FILES = Held(encode(picture(i), "PNG") for i in range(4))
NAMES = [f"{i}.png" for i in range(4)]


def make(**changes: object) -> Encoded:
    given = {"names": NAMES, "labels": np.array([0, 1, 0, 1]), "classes": ("a", "b"), "read": FILES}
    return Encoded(**{**given, **changes})


def test_images_are_decoded_on_demand() -> None:
    read = []
    source = make(read=lambda index: read.append(index) or FILES[index])
    assert len(source) == 4
    np.testing.assert_array_equal(source.image(2), picture(2))
    assert read == [2]


def test_a_part_keeps_names_labels_and_images() -> None:
    part = make().take([3, 0]).take([1, 0])
    assert [part.name(i) for i in range(2)] == ["0.png", "3.png"]
    assert part.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(part.image(1), picture(3))


def test_a_file_that_cannot_be_read_is_named() -> None:
    def gone(index: int) -> bytes:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(DamagedError, match=r"^1\.png: No such file or directory$"):
        make(read=gone).image(1)


@pytest.mark.parametrize("channels", [0, 2, 4])
def test_channels_are_one_or_three(channels: int) -> None:
    with pytest.raises(ValueError, match=f"channels {channels}: choose 1"):
        make(channels=channels)


def test_a_listing_leaves_out_labels_that_are_no_class_and_says_so() -> None:
    known = DamagedError("x", "seen while listing")
    listing = Listing(NAMES, np.array([0, 5, -1, 1]), FILES, (known,))
    source, problems = listing.source(("a", "b"), 3)
    assert [source.name(i) for i in range(len(source))] == ["0.png", "3.png"]
    assert [str(problem) for problem in problems] == [
        "x: seen while listing",
        "1.png: label 5, but the classes are 0 to 1",
        "2.png: label -1, but the classes are 0 to 1",
    ]


def test_classes_by_number_go_to_the_largest_label_that_makes_sense() -> None:
    listings = [Listing(NAMES, np.array(labels), FILES) for labels in ([0, 3], [5, 999_999_999], [-1, 0])]
    assert numbered_classes(*listings) == ("0", "1", "2", "3", "4", "5")
