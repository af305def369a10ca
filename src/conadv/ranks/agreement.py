"""Check that all ranks have the same flags, data and software, and raise errors of one rank on all of them.

rank 0 broadcasts its facts ──► every rank compares its own ──► all_reduce: does any differ? ──► broadcast what differs
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")

# Seconds between two all_reduces of the ranks while rank 0 works.
_MEETING = 2.0
# Facts by group and name, and what to do if ranks have different ones.
Facts = Mapping[str, Mapping[str, Any]]
_ADVICE = {
    "flags": "start all ranks with the same flags",
    "data": "give all ranks the same data",
    "software": "install the same on all machines",
    "method": "pass the same arguments on all ranks",
}


class AgreedError(ValueError):
    """A user's mistake that every rank raises with the same message; one rank prints it."""


def check_agreement(world: World, facts: Facts) -> None:
    """Raise an AgreedError on all ranks if the facts of any rank differ from those of `main`.

    Args:
        world: The ranks, all of which must call this.
        facts: JSON values by group (`flags`, `data`, `software` or `method`) and name.
    """
    if world.size == 1:
        return
    text = json.dumps(facts, default=lambda value: type(value).__name__)
    own, first = json.loads(text), json.loads(world.broadcast(text.encode()))
    different = [
        f"rank {world.rank} has {name} {_show(own[group].get(name))}, "
        f"rank {world.main} has {_show(first[group].get(name))}: {_ADVICE[group]}"
        for group in own
        for name in {**first[group], **own[group]}
        if own[group].get(name) != first[group].get(name)
    ]
    _raise_on_all(world, different[0] if different else None)


def from_main(world: World, work: Callable[[], bytes | None]) -> bytes:
    """Call `work` on rank 0 and broadcast what it returns; a ValueError there is an AgreedError on all ranks.

    The work may take longer than the timeout: rank 0 does it in a thread, and all ranks call all_reduce every few
    seconds, which notices a rank that is lost.
    """
    future = ThreadPoolExecutor(1).submit(work if world.is_main else bytes)
    while world.all_reduce_max(not wait([future], min(_MEETING, world.timeout / 4)).done):
        pass
    return world.broadcast(on_all(world, future.result) or b"")


def on_all(world: World, work: Callable[[], T]) -> T:
    """Call `work` on every rank; a ValueError on any of them is an AgreedError on all."""
    if world.size == 1:
        return work()
    results, problem = [], None
    try:
        results.append(work())
    except ValueError as error:
        problem = ("" if world.is_main else f"rank {world.rank}: ") + str(error)
    _raise_on_all(world, problem)
    return results[0]


def _raise_on_all(world: World, problem: str | None) -> None:
    """Raise an AgreedError with the problem of the lowest rank that has one; None: this rank has none."""
    highest = world.all_reduce_max(0 if problem is None else world.size - world.rank)
    if highest:
        raise AgreedError(world.broadcast((problem or "").encode(), world.size - highest).decode())


def _show(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
