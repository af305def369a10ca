"""Who adds gradients up, and who only receives the sum.

learning ranks ──► all_reduce among them ──► the clean rank of a lane sends the sum ──► its rank that only attacks

For n lanes of "clean | adv | attack" and G bytes of gradients, a sum over all ranks would move (6n - 2)·G bytes, and
wait for the attack. This way (5n - 2)·G move, and the sums overlap the backward pass, whatever the attack takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from .collectives import World
from .layout import Layout


@dataclass(frozen=True)
class Recipients:
    """Where the gradients of this rank go, and from where their sum comes; by default, all ranks add up theirs."""

    world: World
    learners: int | None = None
    """How many ranks add up gradients; None: all of them do."""
    sums: dist.ProcessGroup | None = None
    """The group of the learning ranks; None: all ranks."""
    messages: dist.ProcessGroup | None = None
    """The group in which sums are sent to a rank that only attacks."""
    source: int | None = None
    """The rank that sends the sums to this one, which only attacks."""
    target: int | None = None
    """The rank that only attacks, to which this one sends the sums."""

    def start_sum(self, gradients: Tensor) -> dist.Work | None:
        """Begin the sum of a bucket, in place; None where there is nothing to wait for."""
        if self.source is not None or self.learners == 1:
            return None
        return self.world.start_all_reduce(gradients, self.sums)

    def start_passing(self, total: Tensor) -> dist.Work | None:
        """Begin to send a sum to the rank of this lane that only attacks, or to receive it there, in place."""
        if self.source is not None:
            assert self.messages is not None
            return self.world.start_receive(total, self.source, self.messages)
        if self.target is not None:
            assert self.messages is not None
            return self.world.start_send(total, self.target, self.messages)
        return None


def recipients(layout: Layout, world: World) -> Recipients:
    """Who adds gradients up in a layout. Every rank must call it, since it may make groups."""
    pair = layout.follower(layout.lane(world.rank))
    if pair is None:
        return Recipients(world)
    clean, attack = pair
    learners = layout.learners()
    return Recipients(
        world,
        learners=len(learners),
        sums=world.new_group(learners),
        messages=world.new_group(),
        source=clean if world.rank == attack else None,
        target=attack if world.rank == clean else None,
    )
