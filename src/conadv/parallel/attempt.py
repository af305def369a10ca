"""Which attempt at a run this is, the same on all ranks.

torchrun may keep the store when it starts the ranks again, with what earlier processes left there; and each of its
agents counts its own restarts, so nodes can have different counts. So rank 0 numbers the attempts, and gives the number
only to processes that asked for it:

rank n   appends "n NONCE" to the list of arrivals ──► waits for the key of its nonce ──► is present
rank 0   takes a number ──► reads arrivals, answers each nonce with the number ──► until all are present
"""

from __future__ import annotations

import time
from typing import Protocol
from uuid import uuid4

_PAUSE = 0.1


class Store(Protocol):
    """What we need of PyTorch's stores."""

    def add(self, key: str, amount: int) -> int: ...

    def append(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def multi_set(self, keys: list[str], values: list[str]) -> None: ...


class AbsentError(RuntimeError):
    """Ranks did not come in time.

    Args:
        attempt: The attempt that they were waited for in.
        ranks: Who they are.
        timeout: How long they were waited for, in seconds.
    """

    def __init__(self, attempt: int, ranks: list[int], timeout: float) -> None:
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        which = f"ranks {shown}" if len(ranks) > 1 else f"rank {shown}"
        super().__init__(f"{which} did not come within {timeout:g} seconds")
        self.attempt = attempt


def agree_on_attempt(store: Store, rank: int, size: int, timeout: float) -> int:
    """The number of this attempt, counted from 0 in this store; an AbsentError names ranks that do not come in time.

    Args:
        store: The launcher's or rank 0's store, which earlier attempts may have used.
        rank: This rank.
        size: The number of ranks.
        timeout: Seconds until rank 0 gives up; other ranks wait as long as their store does.
    """
    return _lead(store, size, timeout) if rank == 0 else _follow(store, rank)


def _follow(store: Store, rank: int) -> int:
    nonce = uuid4().hex
    store.append("conadv/arrivals", f"{rank} {nonce}\n")
    number = int(store.get(_answer_to(nonce)))
    store.append(_names(number), f" {rank}")
    store.add(_present(number), 1)
    return number


def _lead(store: Store, size: int, timeout: float) -> int:
    number = store.add("conadv/attempts", 1) - 1
    store.append("conadv/arrivals", "\n")  # from here on there is something to read
    answered: set[str] = set()
    end = time.monotonic() + timeout
    while (present := store.add(_present(number), 0)) < size - 1:
        if time.monotonic() > end:
            came = {0, *map(int, store.get(_names(number)).split())} if present else {0}
            raise AbsentError(number, [rank for rank in range(size) if rank not in came], timeout)
        lines = store.get("conadv/arrivals").decode().split("\n")
        new = {line.split()[1] for line in lines if line} - answered
        if new:
            store.multi_set([_answer_to(nonce) for nonce in new], [str(number)] * len(new))
            answered |= new
        else:
            time.sleep(_PAUSE)
    return number


def _answer_to(nonce: str) -> str:
    return f"conadv/answers/{nonce}"


def _names(number: int) -> str:
    return f"conadv/attempts/{number}/names"


def _present(number: int) -> str:
    return f"conadv/attempts/{number}/present"
