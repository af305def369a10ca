"""What all ranks must have in common, such as flags, data and software; and the work of rank 0 for all.

rank 0 broadcasts its facts ──► every rank compares its own ──► one that differs raises an error, which ends all ranks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World

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


def check_agreement(world: World, facts: Facts) -> None:
    """Raise a ValueError on a rank whose facts differ from those of `main`; no rank goes on before all have compared.

    Args:
        world: The ranks, all of which must call this.
        facts: JSON values by group (`flags`, `data`, `software` or `method`) and name.
    """
    text = json.dumps(facts, default=lambda value: type(value).__name__)
    own, of_main = json.loads(text), json.loads(world.broadcast(text.encode()))
    for group, some in own.items():
        for name in {**of_main[group], **some}:
            mine, other = some.get(name), of_main[group].get(name)
            if mine != other:
                raise ValueError(f"{name} is {_show(mine)}, on rank {world.main} {_show(other)}: {_ADVICE[group]}")
    world.barrier()


def from_main(world: World, work: Callable[[], bytes | None]) -> bytes:
    """Call `work` on rank 0 and broadcast what it returns.

    The work may take longer than the timeout: rank 0 does it in a thread, and all ranks call all_reduce every few
    seconds, which notices a rank that is lost.
    """
    future = ThreadPoolExecutor(1).submit(work if world.is_main else bytes)
    while world.any(not wait([future], min(_MEETING, world.timeout / 4)).done):
        pass
    return world.broadcast(future.result() or b"")


def _show(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
