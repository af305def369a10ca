"""Which messages with twins a rank sends and receives. Only arithmetic.

There is one message per chunk, from the rank that generates its twins to the rank that learns from them. All ranks use
the same order, so that no two of them wait for each other: by batch; within a batch first the messages before the
gradient sums, then those after them; then by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conadv.core.roles import Role

from .layout import Layout

# Whether a chunk has twins, from the number of the batch, the first chunk of the lane, and its number within the lane.
HasTwins = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class Message:
    """A message with the twins of one chunk."""

    place: int
    """The position of its batch in the order in which batches are handed over, from 0."""
    chunk: int
    """The number of the chunk within the global batch."""
    source: int
    target: int
    is_late: bool
    """Whether it is sent after the start of the gradient sums, as the last message of its source in a step."""


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank.

    Args:
        layout: which ranks generate twins, and which learn from them.
        rank: the rank.
        chunks: how many chunks a global batch has.
        ahead: steps between generating a twin and learning from it.
        has_twins: which chunks have twins.
    """

    layout: Layout
    rank: int
    chunks: int
    ahead: int
    has_twins: HasTwins = lambda batch, first, number: True

    def sent(self, batch: int, place: int, primed: bool) -> list[Message]:
        """Return the messages of a batch that this rank sends, by chunk.

        Args:
            batch: the number of the batch, which decides which chunks have twins.
            place: its position in the order in which batches are handed over.
            primed: whether it is put in flight before the first step, and so before any gradient sum.
        """
        return [message for message in self._lane(batch, place, primed) if message.source == self.rank]

    def received(self, batch: int, place: int, primed: bool) -> list[Message]:
        """Return the messages of a batch that this rank receives, by chunk."""
        return [message for message in self._lane(batch, place, primed) if message.target == self.rank]

    def _lane(self, batch: int, place: int, primed: bool) -> list[Message]:
        lane = self.layout.lane_chunks(self.rank, self.chunks)
        found = [chunk for number, chunk in enumerate(lane) if self.has_twins(batch, lane.start, number)]
        ends = {
            chunk: tuple(self.layout.owner(duty, chunk, self.chunks) for duty in (self.layout.maker(), Role.ADV))
            for chunk in found
        }
        last = {source: chunk for chunk, (source, _) in ends.items()}
        # The last twins of a clean backward pass exist only after it. Twins for the same step are needed before.
        waits = self.ahead > 0 and not primed
        return [
            Message(place, chunk, source, target, waits and chunk == last[source])
            for chunk, (source, target) in ends.items()
        ]
