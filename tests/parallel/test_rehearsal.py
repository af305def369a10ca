"""A run on 4,608 ranks, rehearsed: what a rank does at its start and in each step is what it does on 6."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from conadv.parallel.attempt import agree_on_attempt
from conadv.parallel.heartbeats import Heartbeats
from recorded import Call, record_rank

ROLES = "clean | adv | attack"
CHUNK = 4  # images; one chunk per lane


def calls_of(rank: int, size: int) -> list[tuple[str, int, int]]:
    """Kind, group and size of each call of a rank in three steps."""
    batch = size // 3 * CHUNK
    changes = {
        "method": "conadv",
        "layout": ROLES,
        "batch_size": batch,
        "chunk_size": CHUNK,
        "data__name": "synthetic",
        "data__train_size": batch,
        "data__image_size": 8,
        "epochs": 3,
        "schedule__warmup_epochs": "0%",
        "checkpoint__every": 1,
    }
    return [_about(call) for call in record_rank(rank, size, changes)]


def _about(call: Call) -> tuple[str, int, int]:
    return call.kind, call.group, call.size


@pytest.mark.parametrize("role", range(3), ids=ROLES.split(" | "))
def test_messages_and_sums_do_not_grow_with_the_ranks(role):
    expected = calls_of(role, 6)
    assert expected
    assert calls_of(role, 4608) == expected
    assert calls_of(4608 - 3 + role, 4608) == expected


class CountingStore:
    """A store in this process that counts requests."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.requests: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def append(self, key: str, value: str) -> None:
        self.requests["append"] += 1
        self.values[key] = self.values.get(key, "") + value

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        if key.startswith("conadv/answers/"):  # the answer of rank 0, which would be waited for
            return b"0"
        return self.values[key].encode()

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.requests["multi_set"] += 1
        self.values.update(zip(keys, values, strict=True))

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:
        self.requests["multi_get"] += 1
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests["compare_set"] += 1
        if self.values[key] == expected:
            self.values[key] = desired
        return self.values[key].encode()


@pytest.mark.parametrize("size", [6, 4608])
def test_a_rank_asks_the_store_three_times_to_start_and_once_per_heartbeat(size):
    store = CountingStore()
    agree_on_attempt(store, 1, size, timeout=1)
    assert store.requests == {"append": 1, "get": 1, "add": 1}
    for rank in range(2, size):
        agree_on_attempt(store, rank, size, timeout=1)
    store.requests.clear()
    agree_on_attempt(store, 0, size, timeout=1)
    heartbeats = [Heartbeats(store, rank, size) for rank in range(size)]
    heartbeats[0].open()
    assert store.requests.total() <= 6, "rank 0 answers all ranks at once"
    store.requests.clear()
    for heartbeat in heartbeats:
        assert heartbeat.beat(awaits=False) is None
    assert store.requests == {"compare_set": size}
    store.requests.clear()
    assert len(heartbeats[0].look()) == size
    assert store.requests.total() == 1
