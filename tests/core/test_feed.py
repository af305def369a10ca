"""A loader in pairs of a batch and a later one, in every epoch anew."""

from __future__ import annotations

import pytest

from conadv.core.batch import Feed


@pytest.mark.parametrize(
    ("ahead", "pairs"),
    [
        (0, [(1, None), (2, None), (3, None)]),
        (1, [(1, 2), (2, 3), (3, None)]),
        (2, [(1, 3), (2, None), (3, None)]),
        (4, [(1, None), (2, None), (3, None)]),
    ],
)
def test_a_batch_comes_with_the_one_that_is_so_many_steps_later(
    ahead: int, pairs: list[tuple[int, int | None]]
) -> None:
    begun: list[None] = []
    feed = Feed([1, 2, 3], ahead, lambda: begun.append(None))
    assert len(feed) == 3
    for epoch in (1, 2):
        assert list(feed) == pairs
        assert len(begun) == epoch
