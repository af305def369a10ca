"""All ranks agree on the attempt, whatever earlier processes left in the store and however often each was started."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from conadv.ranks.world import agree_on_attempt


def come_together(store, size: int) -> list[int]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: agree_on_attempt(store, rank, size, 20), range(size)))


def test_attempts_are_numbered_and_all_ranks_have_the_same():
    store = dist.HashStore()
    assert [come_together(store, 5) for _ in range(3)] == [[0] * 5, [1] * 5, [2] * 5]


@pytest.mark.parametrize("died", [[0], [1], [0, 2], [1, 2, 3]], ids=str)
def test_ranks_that_died_before_all_had_come_do_not_count(died):
    """What they left in the store is there still, as after a restart of torchrun."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    for rank in died:
        with pytest.raises(RuntimeError):
            agree_on_attempt(store, rank, 4, timeout=0.1)
    store.set_timeout(timedelta(seconds=20))
    attempts = come_together(store, 4)
    assert attempts == [attempts[0]] * 4


def test_rank_0_names_the_ranks_that_did_not_come():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=2))
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(agree_on_attempt, store, 0, 4, 1.0)
        threads.submit(agree_on_attempt, store, 2, 4, 1.0)
        with pytest.raises(RuntimeError, match=r"^ranks 1, 3 did not come within 1 seconds$"):
            late.result()
    with pytest.raises(RuntimeError, match=r"^rank 1 did not come within 0\.1 seconds$"):
        agree_on_attempt(dist.HashStore(), 0, 2, timeout=0.1)


def test_ranks_of_an_earlier_attempt_have_not_come_to_this_one():
    store = dist.HashStore()
    come_together(store, 3)
    with pytest.raises(RuntimeError, match=r"^ranks 1, 2 did not come"):
        agree_on_attempt(store, 0, 3, timeout=0.1)
