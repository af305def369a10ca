"""Heartbeats in the store: who lives, who finds out why a run ends, and how little that asks of the store."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from conadv.core.algorithm import ConAdv
from conadv.ranks import heartbeats as module
from conadv.ranks import watch
from conadv.ranks.collectives import World
from conadv.ranks.heartbeats import Heartbeats, Pulse, Verdict
from conadv.ranks.layout import Layout

RANKS = 4608


def opened(store, size: int) -> list[Heartbeats]:
    ranks = [Heartbeats(store, rank, size) for rank in range(size)]
    ranks[0].open()
    return ranks


def test_beats_are_counted_by_rank():
    ranks = opened(dist.HashStore(), 3)
    assert ranks[1].beat(awaits=False) is None
    assert ranks[1].beat(awaits=True) is None
    assert ranks[0].beat(awaits=False) is None
    assert ranks[2].look() == [Pulse(1, False), Pulse(2, True), Pulse(0, False)]


def test_of_many_that_would_speak_one_is_the_first():
    store = dist.HashStore()
    with ThreadPoolExecutor(8) as threads:
        firsts = list(threads.map(lambda rank: Heartbeats(store, rank, 40).claim_report(), range(40)))
    assert firsts.count(True) == 1


def test_the_next_heartbeat_of_every_rank_reads_the_verdict():
    ranks = opened(dist.HashStore(), 3)
    for rank in ranks:
        rank.beat(awaits=False)
    verdict = Verdict(2, "rank 1: this image: cannot ! be read", 1)
    ranks[1].publish(verdict)
    assert [rank.beat(awaits=True) for rank in ranks] == [verdict] * 3


def test_ranks_that_have_left_are_counted():
    ranks = opened(dist.HashStore(), 3)
    assert ranks[0].left() == 0
    ranks[1].leave()
    ranks[2].leave()
    assert ranks[0].left() == 2


def test_a_store_that_is_gone_is_a_runtime_error():
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    with pytest.raises(RuntimeError, match="Broken pipe"):
        Heartbeats(Gone(), 0, 2).claim_report()


def test_a_store_that_does_not_answer_is_a_runtime_error(monkeypatch):
    """As when the rank that keeps it is stopped: its clients would wait for ever."""

    class Stopped:
        def add(self, key: str, amount: int) -> int:
            threading.Event().wait()
            raise AssertionError

    monkeypatch.setattr(module, "_ANSWER", 0.1)
    with pytest.raises(RuntimeError, match="did not answer"):
        Heartbeats(Stopped(), 0, 2).claim_report()


class CountingStore:
    """A store that counts the requests of each rank; tests say which one asks."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[int] = Counter()
        self.asking = 0

    def add(self, key: str, amount: int) -> int:
        self.requests[self.asking] += 1
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests[self.asking] += 1
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests[self.asking] += 1
        return [self.values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.requests[self.asking] += 1
        self.values.update(zip(keys, (value.encode() for value in values), strict=True))


def test_one_of_thousands_of_ranks_investigates_and_the_others_ask_a_few_times(monkeypatch):
    store = CountingStore()
    ranks = opened(store, RANKS)
    lost, living = 4000, [rank for rank in range(RANKS) if rank != 4000]

    def beat_all(*_: object) -> list[Verdict | None]:
        verdicts = []
        asking = store.asking
        for store.asking in living:
            verdicts.append(ranks[store.asking].beat(awaits=True))
        store.asking = asking
        return verdicts

    store.asking = lost
    ranks[lost].beat(awaits=False)
    beat_all()
    assert max(store.requests[rank] for rank in living[1:]) == 1  # a heartbeat is one request
    before = store.requests.copy()

    clock = iter(range(1000))
    monkeypatch.setattr(watch.time, "monotonic", lambda: float(next(clock)))  # a second from look to look
    monkeypatch.setattr(watch.time, "sleep", beat_all)
    firsts = []
    for store.asking in living:
        firsts.append(ranks[store.asking].claim_report())
    assert firsts.count(True) == 1
    store.asking = investigator = living[firsts.index(True)]
    layout = Layout.fit(None, ConAdv.duties, RANKS)
    world = World(investigator, RANKS, torch.device("cpu"), ranks[investigator])
    verdict = watch._Watch(world, layout, ranks[investigator], lambda status: None, hint="")._investigate("")
    assert verdict == Verdict(1, f"{layout.describe(lost)} stopped answering: the run ends on all {RANKS} ranks", 1)
    ranks[investigator].publish(verdict)
    assert beat_all() == [verdict] * len(living)
    asked = store.requests - before
    looks = round(watch._PATIENCE / watch._HASTE)
    assert asked[investigator] <= 2 * looks + 5
    assert max(asked[rank] for rank in living if rank != investigator) <= looks + 3


def test_a_rank_that_is_not_the_first_to_notice_waits_for_the_verdict_and_looks_at_nobody(monkeypatch):
    class Waits(Exception):  # noqa: N818 - in place of the wait
        pass

    def wait(seconds: float) -> None:
        raise Waits(seconds)

    store = CountingStore()
    first, second, _ = opened(store, 3)
    assert first.claim_report()
    monkeypatch.setattr(watch.time, "sleep", wait)
    monkeypatch.setattr(store, "multi_get", lambda keys: pytest.fail("another rank looks already"))
    own = watch._Watch(World(1, 3, torch.device("cpu"), second), Layout.fit(None, ConAdv.duties, 3), second, print, "")
    with pytest.raises(Waits) as waits:
        own.leave_after_peer("a connection broke")
    assert waits.value.args[0] > watch._PATIENCE


def test_of_two_ranks_that_find_out_why_a_run_ends_one_says_so(monkeypatch, capsys):
    """As on a busy machine, where the first to notice takes longer to find out than the second waits for it."""

    class Ended(Exception):  # noqa: N818 - in place of the end of the process
        pass

    class Told(Exception):  # noqa: N818 - the next heartbeat reads the verdict
        pass

    def end(status: int) -> None:
        raise Ended(status)

    def sleep(seconds: float) -> None:
        for beats in ranks[:2]:
            if beats.beat(awaits=True) is not None:
                raise Told

    clock = iter(range(1000))
    monkeypatch.setattr(watch.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch, "end_process", end)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    ranks = opened(dist.HashStore(), 3)
    layout = Layout.fit("clean | adv | attack", ConAdv.duties, 3)
    slow, fast = (watch._Watch(World(n, 3, torch.device("cpu"), ranks[n]), layout, ranks[n], int, "") for n in (0, 1))
    investigate = slow._investigate

    def overtaken(reason: str) -> Verdict:
        found = investigate(reason)
        with pytest.raises(Ended):
            fast.leave_after_peer("a connection broke")
        return found

    monkeypatch.setattr(slow, "_investigate", overtaken)
    with pytest.raises(Told):
        slow.leave_after_peer("a connection broke")
    line = "error: rank 2 (lane 0, attack) stopped answering: the run ends on all 3 ranks"
    assert capsys.readouterr().err.splitlines() == [line]


def test_a_rank_asks_the_store_once_in_five_seconds():
    assert watch._BEAT >= 5
    assert watch.GRACE + watch._PATIENCE + watch._BEAT + module._ANSWER / 3 <= 15
    assert watch._PATIENCE > watch._BEAT
