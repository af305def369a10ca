"""Which messages a rank sends and receives: the twins of each chunk, from the rank that makes them to the one that
learns from them. Only arithmetic.

Every rank works through the same list, in this order, so that no two ranks wait for each other even where each does one
thing at a time: batch by batch, in each the messages before the gradient sums and then those after, by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conadv.core.roles import Role

from .layout import Layout


@dataclass(frozen=True)
class Message:
    """The twins of one chunk."""

    place: int
    """Of the batch, counted from the first one that was handed over."""
    chunk: int
    """Its number within the global batch."""
    source: int
    target: int
    is_late: bool
    """Whether it is sent after the start of the gradient sums: the last one of its source in a step."""


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank.

    Args:
        layout: says who makes twins, and who learns from them.
        rank: whose messages these are.
        chunks: of a global batch.
        ahead: steps between generating a twin and learning from it.
        has_twins: whether a chunk, counted from the first one of its lane, has twins: of the batch of this number, the
            lane that starts at this chunk, and the chunk.
    """

    layout: Layout
    rank: int
    chunks: int
    ahead: int
    has_twins: Callable[[int, int, int], bool] = lambda batch, first, number: True

    def sent(self, batch: int, place: int, primed: bool) -> list[Message]:
        """The messages that this rank sends of a batch, by chunk.

        Args:
            batch: its number, which decides what chunks have twins.
            place: its place in the order in which batches are handed over.
            primed: it was put in flight before the first step, and so before any gradient sum.
        """
        return [message for message in self._lane(batch, place, primed) if message.source == self.rank]

    def received(self, batch: int, place: int, primed: bool) -> list[Message]:
        """The messages that this rank receives of a batch, by chunk."""
        return [message for message in self._lane(batch, place, primed) if message.target == self.rank]

    def _lane(self, batch: int, place: int, primed: bool) -> list[Message]:
        lane = self.layout.lane_chunks(self.rank, self.chunks)
        found = [chunk for number, chunk in enumerate(lane) if self.has_twins(batch, lane.start, number)]
        ends = {
            chunk: tuple(self.layout.owner(duty, chunk, self.chunks) for duty in (self.layout.maker(), Role.ADV))
            for chunk in found
        }
        last = {source: chunk for chunk, (source, _) in ends.items()}
        # Where twins come with the clean gradient, the last one exists only then. Those of the same step are needed
        # before.
        waits = self.ahead > 0 and not primed
        return [
            Message(place, chunk, source, target, waits and chunk == last[source])
            for chunk, (source, target) in ends.items()
        ]
