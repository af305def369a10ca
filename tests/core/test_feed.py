"""A loader in pairs: its place in an epoch can be saved, and its end comes with the last batch that is learnt from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conadv.core.batch import Feed


def learnt_from(feed: Feed) -> list[Any]:
    return [now for now, _ in feed]


class Flagged(list[int]):
    """As a loader of Accelerate, which says with its last batch that the epoch ends."""

    end_of_dataloader = False

    def __iter__(self) -> Iterator[int]:
        for place in range(len(self)):
            self.end_of_dataloader = place == len(self) - 1
            yield self[place]


class Stateful(list[int]):
    """A loader that can continue where it was."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        for place in range(self.start, len(self)):
            self.start = place + 1
            yield self[place]

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["start"]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_end_is_told_with_the_last_batch_that_is_learnt_from(ahead: int) -> None:
    loader = Flagged([1, 2, 3, 4])
    told = [(now, loader.end_of_dataloader) for now, _ in Feed(loader, reads_ahead=ahead)]
    assert told == [(1, False), (2, False), (3, False), (4, True)]


def test_a_state_from_before_the_first_batch_is_that_of_a_whole_epoch() -> None:
    feed = Feed([1, 2, 3])
    feed.load_state_dict(Feed([1, 2, 3]).state_dict())
    assert list(feed) == [(1, None), (2, None), (3, None)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_loader_with_a_state_continues_behind_the_batches_that_were_read_ahead(ahead: int) -> None:
    before, after = (Feed(Stateful([1, 2, 3, 4, 5]), reads_ahead=ahead) for _ in range(2))
    pairs = iter(before)
    assert [next(pairs)[0], next(pairs)[0]] == [1, 2]
    after.load_state_dict(before.state_dict())
    assert learnt_from(after) == [3, 4, 5]
