"""The hand-off: all that lies between making a twin and learning from it, `delay` steps later."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

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

    def twins(self) -> list[Twin]:
        """What is in flight, oldest first."""
        return list(self._twins)

    def __len__(self) -> int:
        return len(self._twins)
