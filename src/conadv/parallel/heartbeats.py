"""What ranks leave for each other in the store, outside of any exchange: heartbeats, and why the run ends.

Each rank has one key, its mailbox. It writes its heartbeats there, and the rank that knows why the run ends overwrites
all of them with the verdict: one request every 5 seconds says that the rank lives, and asks whether the run is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")

# Seconds that the store has for an answer when a run ends; whatever keeps it may be what stopped.
_ANSWER = 3.0
_SILENCE = "0 0"


class Store(Protocol):
    """What we need of PyTorch's stores."""

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...

    def multi_set(self, keys: list[str], values: list[str]) -> None: ...


class Verdict(NamedTuple):
    """Why a run ends, and the exit status of every rank."""

    status: int
    text: str
    lost: int = 0
    """How many ranks will not read it."""


class Pulse(NamedTuple):
    """The last heartbeat of a rank."""

    beats: int
    """How many there were."""
    awaits: bool
    """Whether the rank waited for others then."""


class Heartbeats:
    """One rank's view of the store; a RuntimeError says that the store is gone or does not answer.

    Args:
        store: The store of this attempt of the run.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._size = size
        self._own = _mailbox(rank)
        self._count = 0
        self._last = _SILENCE

    def open(self) -> None:
        """Make every mailbox; one rank does, before any heartbeat."""
        self._fill(_SILENCE)

    def beat(self, awaits: bool) -> Verdict | None:
        """Write a heartbeat, with whether this rank waits for others; returns the verdict if the run is over."""
        self._count += 1
        content = self._store.compare_set(self._own, self._last, f"{self._count} {awaits:d}").decode()
        self._last = content
        return _verdict(content)

    def look(self) -> list[Pulse]:
        """The last heartbeat of every rank, by one request."""
        contents = _answered(lambda: self._store.multi_get(self._mailboxes()))
        return [_pulse(content.decode()) for content in contents]

    def claim_report(self) -> bool:
        """Whether this rank finds out why the run ends: true for the first that asks."""
        return _answered(lambda: self._store.add("conadv/claims", 1)) == 1

    def claim_verdict(self) -> bool:
        """Whether this rank, which knows why the run ends, says so: true for the first that asks."""
        return _answered(lambda: self._store.add("conadv/verdicts", 1)) == 1

    def publish(self, verdict: Verdict) -> None:
        """Leave the verdict in every mailbox."""
        _answered(lambda: self._fill(f"! {verdict.status} {verdict.lost} {verdict.text}"))

    def leave(self) -> None:
        """Count this rank among those that have ended."""
        _answered(lambda: self._store.add("conadv/left", 1))

    def left(self) -> int:
        """How many ranks have ended."""
        return _answered(lambda: self._store.add("conadv/left", 0))

    def _fill(self, content: str) -> None:
        self._store.multi_set(self._mailboxes(), [content] * self._size)

    def _mailboxes(self) -> list[str]:
        return [_mailbox(rank) for rank in range(self._size)]


def _mailbox(rank: int) -> str:
    return f"conadv/mailbox/{rank}"


def _verdict(content: str) -> Verdict | None:
    if not content.startswith("!"):
        return None
    _, status, lost, text = content.split(" ", 3)
    return Verdict(int(status), text, int(lost))


def _pulse(content: str) -> Pulse:
    count, _, awaits = content.partition(" ")
    return Pulse(int(count), awaits == "1") if count != "!" else Pulse(-1, True)


def _answered(request: Callable[[], T]) -> T:
    """The answer to a request, or a RuntimeError: a client of the store would wait forever."""
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
