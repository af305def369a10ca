"""The queue between making a twin and learning from it."""

from __future__ import annotations

import pytest
import torch

from conadv.core.handoff import Handoff, Queue, Twin


def twin(number: int) -> Twin:
    return Twin(torch.full((1,), float(number)), torch.tensor([number]))


def test_first_in_first_out() -> None:
    queue = Queue()
    handoff: Handoff = queue
    for number in range(3):
        handoff.put(twin(number))
    assert [int(one.labels) for one in queue.twins()] == [0, 1, 2] and len(queue) == 3
    assert int(handoff.take().labels) == 0
    handoff.put(twin(3))
    assert [int(handoff.take().labels) for _ in range(3)] == [1, 2, 3]


def test_nothing_to_take_is_said_in_words() -> None:
    queue = Queue()
    queue.put(twin(0))
    queue.clear()
    assert len(queue) == 0 and queue.twins() == []
    with pytest.raises(ValueError, match=r"no twin is in flight: take the batches from `method.feed\(loader\)`"):
        queue.take()
