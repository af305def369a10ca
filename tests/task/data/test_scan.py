"""A scan decodes every image once, and returns sizes and damage."""

from __future__ import annotations

import numpy as np
import pytest

from conadv.task.data.encoded import Encoded
from conadv.task.data.scan import scan
from conadv.task.data.source import Arrays
from task.data.samples import Held, encode, picture

FILES = Held([encode(picture(0, 10, 20)), b"no image", encode(picture(1, 30, 15), "PNG"), encode(picture(2))[:150]])


def source() -> Encoded:
    return Encoded([f"{i}.jpg" for i in range(4)], np.zeros(4, int), ("a",), FILES)


@pytest.mark.parametrize("workers", [0, 3])
def test_sizes_and_reasons(workers: int) -> None:
    seen = scan(source(), f"stamp{workers}", workers)
    assert seen.heights.tolist() == [10, 0, 30, 0]
    assert seen.widths.tolist() == [20, 0, 15, 0]
    assert list(seen.damaged) == [1, 3]
    assert seen.damaged[1] == "not an image of a known format"


def test_a_scan_is_remembered_by_its_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    first = scan(source(), "stamp", 0)
    monkeypatch.setattr("conadv.task.data.scan._decode", None)  # whoever decodes now fails
    again = scan(source(), "stamp", 0)
    assert again.damaged == first.damaged
    np.testing.assert_array_equal(again.heights, first.heights)
    with pytest.raises(TypeError):
        scan(source(), "another stamp", 0)


def test_arrays_have_one_size_and_nothing_damaged() -> None:
    seen = scan(Arrays(np.zeros((3, 5, 7, 1), np.uint8), np.zeros(3, int), ("a",)), "", 0)
    assert (seen.heights.tolist(), seen.widths.tolist(), seen.damaged) == ([5] * 3, [7] * 3, {})
