"""Ranks that were started differently end before the first step, and one line says what differs.

rank 0 broadcasts its facts ──► every rank compares its own ──► one all_reduce: does any rank differ? ──► only then more
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collectives import World

# Facts by group, each in words: "rank 1 WORDS key value, rank 0 value: ADVICE".
Facts = Mapping[str, Mapping[str, Any]]
_WORDING = {
    "flags": ("was started with", "start all ranks with the same flags"),
    "data": ("sees", "give all ranks the same data"),
    "software": ("runs", "install the same on all machines"),
}


class AgreedError(ValueError):
    """A mistake of the user that all ranks know of: each raises it, and one says so."""


def check_agreement(world: World, facts: Facts) -> None:
    """Raise an AgreedError on all ranks if any has other facts than rank 0.

    Args:
        world: The ranks, all of which call this.
        facts: What must be the same, as values that JSON can hold: `flags`, `data` and `software`, by name.
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


def _difference(own: Facts, theirs: Facts, rank: int) -> str:
    """What differs first from rank 0, in words; empty: nothing."""
    for group, (words, advice) in _WORDING.items():
        mine, leading = own.get(group, {}), theirs.get(group, {})
        for key in {**leading, **mine}:
            if mine.get(key) != leading.get(key):
                preposition = "with " if group == "flags" else ""
                return (
                    f"rank {rank} {words} {key} {_show(mine.get(key))}, "
                    f"rank 0 {preposition}{_show(leading.get(key))}: {advice}"
                )
    return ""


def _show(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
