"""Which ranks sum gradients, and which only receive the sum.

learning ranks ──► all_reduce among them ──► one of each lane sends the sum ──► ranks of the lane that only attack

For n lanes of "clean | adv | attack" and G bytes of gradients, an all_reduce over all ranks would send (6n - 2)·G bytes
and wait for the attack. This way (5n - 2)·G bytes are sent, and the all_reduce overlaps the backward pass, however long
the attack takes.

With a delay of 2 or more, a rank that only attacks may lag, since its twins are needed `delay` steps later. Learning
ranks then send it the result of each step, and wait for it only when it is `slack` steps behind.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from .collectives import World
from .layout import Layout


@dataclass(frozen=True)
class Recipients:
    """How this rank takes part in the sum of gradients; by default all ranks sum theirs."""

    world: World
    learners: tuple[int, ...] | None = None
    """The ranks that sum gradients; None: all ranks."""
    sums: dist.ProcessGroup | None = None
    """The process group of the learning ranks; None: all ranks."""
    messages: dist.ProcessGroup | None = None
    """The process group in which sums are sent to ranks that only attack."""
    source: int | None = None
    """If this rank only attacks: the rank that sends the sums to it."""
    targets: tuple[int, ...] = ()
    """The ranks that only attack to which this rank sends the sums."""
    slack: int = 0
    """How many steps a rank that only attacks may lag before the others wait for it."""
    _in_flight: deque[list[tuple[dist.Work, Tensor]]] = field(default_factory=deque, repr=False, compare=False)

    @property
    def members(self) -> list[int]:
        """The ranks that wait for each other at the end of a step."""
        return list(self.learners if self.slack and self.learners is not None else range(self.world.size))

    @property
    def may_lag(self) -> bool:
        """Whether this rank only attacks, and others do not wait for it."""
        return self.slack > 0 and self.source is not None

    def start_sum(self, gradients: Tensor) -> dist.Work | None:
        """Start the all_reduce of a bucket over the learning ranks, in place; None if there is nothing to wait for."""
        if self.source is not None or (self.learners is not None and len(self.learners) == 1):
            return None
        return self.world.start_all_reduce(gradients, self.sums)

    def start_all_reduce(self, tensor: Tensor) -> dist.Work | None:
        """Start an all_reduce over `members`, in place."""
        group = self.sums if self.slack else None
        return self.world.start_all_reduce(tensor, group) if len(self.members) > 1 else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over `members`, in place."""
        self.world.wait(self.start_all_reduce(tensor))
        return tensor

    def begin_passing(self) -> None:
        """Begin to send the sums of a step; wait for ranks that lag by `slack` steps."""
        if self.slack and self.targets:
            while len(self._in_flight) >= self.slack:
                self._wait_for_oldest()
            self._in_flight.append([])

    def start_passing(self, total: Tensor) -> list[dist.Work]:
        """Start to send a sum to ranks of this lane that only attack, or to receive it there, in place.

        Returns:
            The works to wait for in this step; none if the receivers may lag: then a copy is sent.
        """
        if self.source is None and not self.targets:
            return []
        assert self.messages is not None
        if self.source is not None:
            return [self.world.start_receive(total, self.source, self.messages)]
        sent = total.clone() if self.slack else total
        works = [self.world.start_send(sent, target, self.messages) for target in self.targets]
        if not self.slack:
            return works
        self._in_flight[-1].extend((work, sent) for work in works)
        return []

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._in_flight.popleft():
            self.world.wait(work)


def recipients(layout: Layout, world: World, ahead: int) -> Recipients:
    """Return how this rank takes part in the sum of gradients. Every rank must call it, since it may create groups.

    Args:
        layout: which rank does what.
        world: the ranks.
        ahead: steps between generating a twin and learning from it; ranks that only attack may lag by one step less.
    """
    followers = layout.followers()
    if not followers:
        return Recipients(world)
    learners = layout.learners()
    return Recipients(
        world,
        learners=tuple(learners),
        sums=world.new_group(learners),
        messages=world.new_group(),
        source=followers.get(world.rank),
        targets=tuple(rank for rank, source in followers.items() if source == world.rank),
        slack=max(0, ahead - 1),
    )
