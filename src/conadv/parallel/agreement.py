"""Ranks that were started differently end before the first step, and one line says what differs.

rank 0 broadcasts its facts ──► every rank compares its own ──► one all_reduce: does any rank differ? ──► only then more
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .collectives import World

T = TypeVar("T")

# Seconds between two meetings of the ranks while rank 0 works.
_MEETING = 2.0
# Facts by group, each in words: "rank 1 WORDS key value, rank 0 PREPOSITION value: ADVICE".
Facts = Mapping[str, Mapping[str, Any]]
_WORDING = {
    "flags": ("was started with", "with ", "start all ranks with the same flags"),
    "data": ("sees", "", "give all ranks the same data"),
    "software": ("runs", "", "install the same on all machines"),
    "loss": ("multiplies", "by ", "scale the loss by the same number on all ranks"),
}


class AgreedError(ValueError):
    """A mistake of the user that all ranks know of: each raises it, and one says so."""


def check_agreement(world: World, facts: Facts) -> None:
    """Raise an AgreedError on all ranks if any has other facts than rank 0.

    Args:
        world: The ranks, all of which call this.
        facts: What must be the same, as values that JSON can hold: `flags`, `data`, `software`, `loss`, by name.
    """
    if world.size == 1:
        return
    theirs = json.loads(world.broadcast(json.dumps(facts).encode()))
    problem = _difference(json.loads(json.dumps(facts)), theirs, world.rank)
    highest = world.all_reduce_max(world.size - world.rank if problem else 0)
    if highest:  # the lowest rank that differs says in what
        raise AgreedError(world.broadcast(problem.encode(), world.size - highest).decode())


def from_main(world: World, work: Callable[[], bytes | None]) -> bytes:
    """What `work` returns on rank 0, on all ranks; a ValueError there is an AgreedError on all."""
    answer = b""
    if world.is_main:
        try:
            answer = b"+" + (work() or b"")
        except ValueError as error:
            answer = b"-" + str(error).encode()
    answer = world.broadcast(answer)
    if answer[:1] == b"-":
        raise AgreedError(answer[1:].decode())
    return answer[1:]


def from_main_patiently(world: World, work: Callable[[], bytes]) -> bytes:
    """Like `from_main`, for work that may take longer than the timeout of the ranks that wait for it.

    Rank 0 works in a thread, while all ranks meet every few seconds: one that is lost meanwhile is noticed.
    """
    if world.size == 1:
        return work()
    future: Future[bytes] = Future()
    if world.is_main:
        threading.Thread(target=_fulfil, args=(future, work), name="work", daemon=True).start()
    pause = min(_MEETING, world.timeout / 4)
    while world.all_reduce_max(world.is_main and not _ends_within(pause, future)):
        pass
    return from_main(world, future.result)


def on_all(world: World, work: Callable[[], T]) -> T:
    """What `work` returns on each rank; a ValueError on any of them is an AgreedError on all."""
    if world.size == 1:
        return work()
    results, problem = [], ""
    try:
        results.append(work())
    except ValueError as error:
        problem = (f"rank {world.rank}: " if world.rank else "") + str(error)
    highest = world.all_reduce_max(0 if results else world.size - world.rank)
    if highest:  # the lowest rank that has one says what it is
        raise AgreedError(world.broadcast(problem.encode(), world.size - highest).decode())
    return results[0]


def _fulfil(future: Future[bytes], work: Callable[[], bytes]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _ends_within(seconds: float, future: Future[bytes]) -> bool:
    return bool(wait([future], seconds).done)


def _difference(own: Facts, theirs: Facts, rank: int) -> str:
    """What differs first from rank 0, in words; empty: nothing."""
    for group, (words, preposition, advice) in _WORDING.items():
        mine, leading = own.get(group, {}), theirs.get(group, {})
        for key in {**leading, **mine}:
            if mine.get(key) != leading.get(key):
                return (
                    f"rank {rank} {words} {key} {_show(mine.get(key))}, "
                    f"rank 0 {preposition}{_show(leading.get(key))}: {advice}"
                )
    return ""


def _show(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
