"""Heartbeats in the store: signs of life, and who speaks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from conadv.parallel.heartbeats import Heartbeats


def test_beats_are_counted_by_rank():
    heartbeats = Heartbeats(dist.HashStore())
    assert heartbeats.beats(1) == 0
    heartbeats.beat(1, awaits=False)
    heartbeats.beat(1, awaits=True)
    heartbeats.beat(0, awaits=False)
    assert (heartbeats.beats(0), heartbeats.beats(1)) == (1, 2)
    assert (heartbeats.awaits(0), heartbeats.awaits(1)) == (False, True)


def test_of_many_that_would_speak_one_is_the_first():
    store = dist.HashStore()
    assert not Heartbeats(store).has_report()
    with ThreadPoolExecutor(8) as threads:
        firsts = list(threads.map(lambda _: Heartbeats(store).claim_report(), range(40)))
    assert firsts.count(True) == 1
    assert Heartbeats(store).has_report()


def test_without_a_store_everybody_speaks():
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    assert Heartbeats(Gone()).claim_report()
