"""Notes in the store: signs of life, and who speaks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from conadv.parallel.notes import Notes


def test_beats_are_counted_by_rank():
    notes = Notes(dist.HashStore())
    assert notes.beats(1) == 0
    notes.beat(1, awaits=False)
    notes.beat(1, awaits=True)
    notes.beat(0, awaits=False)
    assert (notes.beats(0), notes.beats(1)) == (1, 2)
    assert (notes.awaits(0), notes.awaits(1)) == (False, True)


def test_of_many_that_would_speak_one_is_the_first():
    store = dist.HashStore()
    assert not Notes(store).spoken()
    with ThreadPoolExecutor(8) as threads:
        firsts = list(threads.map(lambda _: Notes(store).speak_first(), range(40)))
    assert firsts.count(True) == 1
    assert Notes(store).spoken()


def test_without_a_store_everybody_speaks():
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    assert Notes(Gone()).speak_first()
