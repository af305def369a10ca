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


def agree_on_attempt(store: Store, rank: int, size: int, timeout: float) -> int:
    """The number of this attempt, counted from 0 in this store; a RuntimeError if not all ranks come in time.

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
    store.add(_present(number), 1)
    return number


def _lead(store: Store, size: int, timeout: float) -> int:
    number = store.add("conadv/attempts", 1) - 1
    store.append("conadv/arrivals", "\n")  # from here on there is something to read
    answered: set[str] = set()
    end = time.monotonic() + timeout
    while (present := store.add(_present(number), 0)) < size - 1:
        if time.monotonic() > end:
            raise RuntimeError(f"{1 + present} of {size} came within {timeout:g} seconds")
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


def _present(number: int) -> str:
    return f"conadv/attempts/{number}/present"
