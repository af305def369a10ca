"""One order of communication on all ranks: a run completes even if a rank does one operation at a time."""

from __future__ import annotations

import pytest

from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from support.fake_ranks import Call, record, replay
from support.promises import few

ATTACKED = [
    (2, "clean+adv | attack"),
    (4, "attack | clean+adv"),
    (2, "clean | adv+attack"),
    (3, "clean | adv | attack"),
    (6, "attack | adv | clean"),
]
CASES = [
    ("vanilla", 0, 2, None),
    ("sam", 0, 2, None),
    ("recycled", 1, 2, None),
    ("recycled", 1, 2, "clean | adv"),
    ("recycled", 1, 4, "adv | clean"),
    *(("conadv", delay, 2, None) for delay in (0, 1, 3)),
    *(("conadv", delay, *case) for delay in (0, 1, 2, 3) for case in ATTACKED),
]


def fields(method: str, delay: int) -> dict[str, object]:
    return {"method": method, "delay": delay} if method == "conadv" else {"method": method}


def usual(method: str, delay: int, size: int, layout: str | None, chunks: int) -> bool:
    """One number of chunks for each method and layout, and one delay for each layout."""
    return size < 6 and chunks == 1 + size % 3 and delay in (0, 1 if layout is None else size - 1)


@pytest.mark.parametrize(
    ("method", "delay", "size", "layout", "chunks"), few(((*case, n) for case in CASES for n in (1, 2, 3)), usual)
)
def test_a_run_completes_where_each_rank_does_one_operation_at_a_time(method, delay, size, layout, chunks):
    lanes = size // len((layout or "all").split("|"))
    batch = 2 * lanes * chunks  # chunks of 2 images
    calls = record(
        size,
        **fields(method, delay),
        layout=layout or "none",
        batch_size=batch,
        chunk_size=2,
        data__train_size=max(10, 2 * batch),
        data__augment="none",
        epochs=2,
        max_steps=5,
        eval_every=1,
    )
    assert all(calls), "every rank takes part"
    assert replay(calls) == [None] * size


# Lanes with several ranks of a role: ranks, layout, and chunks per lane.
UNEVEN = [
    ("conadv", 8, "3 clean | 3 adv | 2 attack", 6),
    ("conadv", 5, "2 clean | 2 adv | attack", 4),
    ("conadv", 6, "2 clean+adv | attack", 4),
    ("conadv", 4, "attack | 3 adv+clean", 3),
    ("conadv", 4, "clean+adv | 3 attack", 3),
    ("recycled", 5, "4 clean | adv", 4),
    ("recycled", 6, "2 clean | adv", 2),
    ("recycled", 3, "clean | 2 adv", 4),
    ("recycled", 5, "3 clean | 2 adv", 6),
]


SHARED = [
    (*case, delay, share)
    for case in UNEVEN
    for delay in (range(4) if case[0] == "conadv" else [1])
    for share in (1, 0.5)
]


@pytest.mark.parametrize(
    ("method", "size", "layout", "chunks", "delay", "share"),
    few(
        SHARED,
        lambda method, size, layout, chunks, delay, share: (
            size < 6 and (delay, share) == ((1, 0.5) if size < 5 else (2, 1))
        ),
    ),
)
def test_it_completes_where_several_ranks_share_a_role(method, size, layout, chunks, delay, share):
    lane = Layout.fit(layout, METHODS[method].duties)
    batch = 2 * (size // lane.world_size) * chunks * (2 if share < 1 else 1)
    calls = record(
        size,
        **fields(method, delay),
        layout=layout,
        twin_share=share,
        batch_size=batch,
        chunk_size=2,
        data__train_size=max(10, 2 * batch),
        data__augment="none",
        epochs=2,
    )
    assert all(calls), "every rank takes part"
    assert replay(calls) == [None] * size


def test_the_replay_notices_two_orders():
    both = (0, 1)
    total, message = Call("allreduce_", both, "0", 1), Call("message", both, "1", 1)
    assert replay([[total, message], [total, message]]) == [None, None]
    assert replay([[total, message], [message, total]]) == [total, message]
    assert replay([[message], []]) == [message, None]
