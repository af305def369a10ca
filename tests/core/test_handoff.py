"""The queue between making a twin and learning from it."""

from __future__ import annotations

import pytest
import torch

from conadv.core.handoff import Handoff, Queue, Twin, empty, queue_of


def twin(number: int) -> Twin:
    return Twin(torch.full((1,), float(number)), torch.tensor([number]))


def test_first_in_first_out() -> None:
    queue = Queue()
    handoff: Handoff = queue
    for number in range(3):
        handoff.put(twin(number))
    assert [int(queue.state()[f"{number}.labels"]) for number in range(3)] == [0, 1, 2] and len(queue) == 3
    assert int(handoff.take().labels) == 0
    handoff.put(twin(3))
    assert [int(handoff.take().labels) for _ in range(3)] == [1, 2, 3]


def test_nothing_to_take_is_said_in_words() -> None:
    queue = Queue()
    queue.put(twin(0))
    queue.clear()
    assert len(queue) == 0 and queue.state() == {}
    with pytest.raises(ValueError, match=r"no twin is in flight: take the batches from `method.feed\(loader\)`"):
        queue.take()


def test_a_state_goes_back_in_the_same_order() -> None:
    queue, other = Queue(), Queue()
    for number in range(3):
        queue.put(twin(number))
    other.put(twin(9))
    other.restore(queue.state(), torch.device("cpu"))
    assert [int(other.take().labels) for _ in range(3)] == [0, 1, 2] and len(other) == 0


def test_only_a_queue_can_be_looked_at_or_emptied() -> None:
    class Elsewhere:
        """A hand-off to another rank."""

        def put(self, twin: Twin) -> None: ...
        def take(self) -> Twin: ...  # type: ignore[empty-body]
        def clear(self) -> None:
            raise AssertionError("what is under way cannot be called back")

    queue = Queue()
    queue.put(twin(0))
    assert queue_of(queue) is queue
    empty(queue)
    assert len(queue) == 0
    empty(Elsewhere())
    with pytest.raises(ValueError, match="save the stale weights and regenerate the twins"):
        queue_of(Elsewhere())
