"""The hand-off: all that lies between making a twin and learning from it, `delay` steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Twin(NamedTuple):
    """The adversarial version of a chunk, with its labels."""

    images: Tensor
    labels: Tensor


class Handoff(Protocol):
    """First in, first out, a chunk at a time; across ranks `put` sends and `take` receives."""

    def put(self, twin: Twin) -> None: ...

    def take(self) -> Twin: ...

    def clear(self) -> None:
        """Forget what is in flight."""


class Queue:
    """The hand-off within one process."""

    def __init__(self) -> None:
        self._twins: deque[Twin] = deque()

    def put(self, twin: Twin) -> None:
        self._twins.append(twin)

    def take(self) -> Twin:
        if not self._twins:
            raise ValueError("no twin is in flight: take the batches from `method.feed(loader)`")
        return self._twins.popleft()

    def clear(self) -> None:
        self._twins.clear()

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """What is in flight, oldest first; plain tuples, which `torch.load` takes from any file."""
        return [(twin.images, twin.labels) for twin in self._twins]

    def restore(self, state: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> None:
        self._twins = deque(Twin(images.to(device), labels.to(device)) for images, labels in state)

    def __len__(self) -> int:
        return len(self._twins)


def queue_of(handoff: Handoff) -> Queue:
    """The hand-off as something whose twins can be looked at, which those between ranks are not."""
    if not isinstance(handoff, Queue):
        raise ValueError("twins in flight between ranks have no state: keep the weights of then, and prime again")
    return handoff


def empty(handoff: Handoff) -> None:
    """Forget what lies in this process; what was under way between ranks was drained when the run stopped."""
    if isinstance(handoff, Queue):
        handoff.clear()
