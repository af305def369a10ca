"""Who does what: the duties of one process, and where it stands among those that take a step together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


class Role(Flag):
    """The duties of one process: learn from clean images, learn from twins, make twins."""

    CLEAN = auto()
    ADV = auto()
    ATTACK = auto()


@dataclass(frozen=True)
class Place:
    """Where one process stands; alone, it does everything."""

    role: Role = Role.CLEAN | Role.ADV | Role.ATTACK
    share: float = 1.0
    """The part of the global batch that it sees. Gradients of all processes are summed."""
    first_chunk: int = 0
    """The number, within the global batch, of the first chunk that it sees."""
    chunks: int | None = None
    """How many chunks of a batch it sees; needed by a role that only learns from twins, and so sees no batch."""
    updates_stats: bool = True
    """Whether the statistics of a step are complete here, so that running statistics move at its end. If not, they
    are summed over the processes like the gradients, and `splitbn.update_running_stats` is called then."""


ALONE = Place()
