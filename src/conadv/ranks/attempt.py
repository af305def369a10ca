"""Agree on the number of an attempt at a run: 0, or 1, 2, ... after torchrun has restarted the ranks.

torchrun may keep the store when it restarts the ranks, with keys of earlier processes, and its agents count their own
restarts, so nodes can have different counts. So rank 0 numbers the attempts, and sends the number to each process that
asks for it, identified by a random nonce:

rank n   appends "n NONCE" to the list of arrivals ──► waits for the key of its nonce ──► is present
rank 0   takes a number ──► reads arrivals, answers each nonce with the number ──► until all are present
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

_PAUSE = 0.1


class AbsentError(RuntimeError):
    """Some ranks did not arrive in time.

    Args:
        attempt: The number of the attempt.
        ranks: The ranks that are missing.
        timeout: How long rank 0 waited, in seconds.
    """

    def __init__(self, attempt: int, ranks: list[int], timeout: float) -> None:
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        which = f"ranks {shown}" if len(ranks) > 1 else f"rank {shown}"
        super().__init__(f"{which} did not come within {timeout:g} seconds")
        self.attempt = attempt


def agree_on_attempt(store: Any, rank: int, size: int, timeout: float) -> int:
    """Return the number of this attempt; an AbsentError on rank 0 names ranks that do not arrive in time.

    Args:
        store: The store of the launcher or of rank 0, which earlier attempts may have used.
        rank: This rank.
        size: The number of ranks.
        timeout: Seconds that rank 0 waits; other ranks wait for the timeout of their store.
    """
    return _lead(store, size, timeout) if rank == 0 else _follow(store, rank)


def _follow(store: Any, rank: int) -> int:
    nonce = uuid4().hex
    store.append("conadv/arrivals", f"{rank} {nonce}\n")
    number = int(store.get(_answer_to(nonce)))
    store.append(_names(number), f" {rank}")
    store.add(_present(number), 1)
    return number


def _lead(store: Any, size: int, timeout: float) -> int:
    number = int(store.add("conadv/attempts", 1)) - 1
    store.append("conadv/arrivals", "\n")  # create the key, so that `get` does not block
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
