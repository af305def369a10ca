"""The hand-off: everything between generating a twin and learning from it, `delay` steps later."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .attack import Call, call_plainly


class Twin(NamedTuple):
    """The adversarial version of a chunk, with its labels."""

    images: Tensor
    labels: Any
    call: Call = call_plainly
    """How the model is called with these images."""


class Handoff(Protocol):
    """First in, first out, one chunk at a time; across ranks `put` sends and `take` receives."""

    def put(self, twin: Twin) -> None: ...

    def take(self) -> Twin: ...

    def clear(self) -> None:
        """Drop the twins in flight."""


class Queue:
    """The hand-off within one process: twins wait in memory."""

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
        """The twins in flight, oldest first."""
        return list(self._twins)

    def state(self) -> dict[str, Tensor]:
        """The twins in flight, oldest first, as tensors by name."""
        found: dict[str, Tensor] = {}
        for number, twin in enumerate(self._twins):
            if not isinstance(twin.labels, Tensor) or twin.call is not call_plainly:
                raise ValueError("twins with structured labels or extra inputs have no state: stop between epochs")
            found |= {f"{number}.images": twin.images, f"{number}.labels": twin.labels}
        return found

    def restore(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Restore what `state` returned."""
        self._twins = deque(
            Twin(state[f"{number}.images"].to(device), state[f"{number}.labels"].to(device))
            for number in range(len(state) // 2)
        )

    def __len__(self) -> int:
        return len(self._twins)


def queue_of(handoff: Handoff) -> Queue:
    """The hand-off as a queue, whose twins can be saved; hand-offs between ranks are refused."""
    if not isinstance(handoff, Queue):
        raise ValueError(
            "twins in flight between ranks have no state: save the stale weights and regenerate the twins (prime)"
        )
    return handoff


def empty(handoff: Handoff) -> None:
    """Clear a queue of this process; messages between ranks were drained when the run stopped."""
    if isinstance(handoff, Queue):
        handoff.clear()
