"""Heartbeats that ranks write to the store, and the verdict: why the run ends.

Each rank has one key, its mailbox, and writes its heartbeats there. The rank that knows why the run ends overwrites all
mailboxes with the verdict. So one request every 5 seconds both shows that a rank is alive and reads the verdict.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

# Seconds to wait for the store when a run ends, since the process that hosts it may be the one that stopped.
_ANSWER = 3.0
_SILENCE = "0 0"


class Store(Protocol):
    """The methods of a torch.distributed store that we use."""

    def add(self, key: str, amount: int) -> int: ...

    def append(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...

    def multi_set(self, keys: list[str], values: list[str]) -> None: ...


class Verdict(NamedTuple):
    """Why a run ends, and the exit status of every rank."""

    status: int
    text: str
    lost: int = 0
    """How many ranks do not answer, and so will not read it."""


class Pulse(NamedTuple):
    """The last heartbeat of a rank."""

    beats: int
    """How many the rank has written."""
    awaits: bool
    """Whether the rank was waiting for others."""


class Heartbeats:
    """The heartbeats of a run, as one rank sees them; a RuntimeError means that the store does not answer.

    Args:
        store: The store of this attempt of the run.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._mailboxes = [f"conadv/mailbox/{number}" for number in range(size)]
        self._own = self._mailboxes[rank]
        self._count = 0
        self._last = _SILENCE

    def open(self) -> None:
        """Create all mailboxes; rank 0 does so before any heartbeat."""
        self._fill(_SILENCE)

    def beat(self, awaits: bool) -> Verdict | None:
        """Write a heartbeat, with whether this rank waits for others; return the verdict if there is one."""
        self._count += 1
        content = self._store.compare_set(self._own, self._last, f"{self._count} {awaits:d}").decode()
        self._last = content
        return _verdict(content)

    def look(self) -> list[Pulse]:
        """Read the last heartbeat of every rank, in one request."""
        contents = _answered(lambda: self._store.multi_get(self._mailboxes))
        return [_pulse(content.decode()) for content in contents]

    def claim_report(self) -> bool:
        """Claim to find out why the run ends: True for the first rank that asks."""
        return _answered(lambda: self._store.add("conadv/claims", 1)) == 1

    def claim_verdict(self) -> bool:
        """Claim to report why the run ends: True for the first rank that asks."""
        return _answered(lambda: self._store.add("conadv/verdicts", 1)) == 1

    def publish(self, verdict: Verdict) -> None:
        """Write the verdict to every mailbox."""
        _answered(lambda: self._fill(f"! {verdict.status} {verdict.lost} {verdict.text}"))

    def leave(self) -> None:
        """Count this rank among those that have ended."""
        _answered(lambda: self._store.add("conadv/left", 1))

    def left(self) -> int:
        """Return how many ranks have ended."""
        return _answered(lambda: self._store.add("conadv/left", 0))

    def _fill(self, content: str) -> None:
        self._store.multi_set(self._mailboxes, [content] * len(self._mailboxes))


def _verdict(content: str) -> Verdict | None:
    if not content.startswith("!"):
        return None
    _, status, lost, text = content.split(" ", 3)
    return Verdict(int(status), text, int(lost))


def _pulse(content: str) -> Pulse:
    count, _, awaits = content.partition(" ")
    return Pulse(int(count), awaits == "1") if count != "!" else Pulse(-1, True)


def _answered(request: Callable[[], T]) -> T:
    """Return the answer to a request of the store, or raise a RuntimeError if it takes too long."""
    box: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            box.put(request())
        except RuntimeError as error:
            box.put(error)

    threading.Thread(target=ask, name="store", daemon=True).start()
    try:
        answer = box.get(timeout=_ANSWER)
    except queue.Empty:
        raise RuntimeError(f"the store did not answer within {_ANSWER:g} seconds") from None
    if isinstance(answer, RuntimeError):
        raise answer
    return answer
