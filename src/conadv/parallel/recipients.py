"""Who adds gradients up, and who only receives the sum.

learning ranks ──► all_reduce among them ──► one of a lane sends the sum ──► its rank that only attacks

For n lanes of "clean | adv | attack" and G bytes of gradients, a sum over all ranks would move (6n - 2)·G bytes, and
wait for the attack. This way (5n - 2)·G move, and the sums overlap the backward pass, whatever the attack takes.

With a delay of 2 or more, a rank that only attacks may fall behind, since its twins are needed `delay` steps later. The
learning ranks then do not wait for it in each step: what it needs of a step is sent to it, and a sender waits for it
only when it is `slack` steps behind.
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
    """Where the gradients of this rank go, and from where their sum comes; by default, all ranks add up theirs."""

    world: World
    learners: tuple[int, ...] | None = None
    """The ranks that add up gradients; None: all of them do."""
    sums: dist.ProcessGroup | None = None
    """The group of the learning ranks; None: all ranks."""
    messages: dist.ProcessGroup | None = None
    """The group in which sums are sent to a rank that only attacks."""
    source: int | None = None
    """The rank that sends the sums to this one, which only attacks."""
    targets: tuple[int, ...] = ()
    """The ranks that only attack to which this one sends the sums."""
    slack: int = 0
    """How many steps a rank that only attacks may fall behind before it holds the others up."""
    _under_way: deque[list[tuple[dist.Work, Tensor]]] = field(default_factory=deque, repr=False, compare=False)

    @property
    def members(self) -> list[int]:
        """The ranks that wait for each other at the end of a step."""
        return list(self.learners if self.slack and self.learners is not None else range(self.world.size))

    @property
    def size(self) -> int:
        """How many ranks wait for each other at the end of a step."""
        return len(self.members)

    @property
    def may_lag(self) -> bool:
        """Whether this rank only attacks, and others do not wait for it."""
        return self.slack > 0 and self.source is not None

    def start_sum(self, gradients: Tensor) -> dist.Work | None:
        """Begin the sum of a bucket, in place; None where there is nothing to wait for."""
        if self.source is not None or (self.learners is not None and len(self.learners) == 1):
            return None
        return self.world.start_all_reduce(gradients, self.sums)

    def start_all_reduce(self, tensor: Tensor) -> dist.Work | None:
        """Begin the sum over the ranks that wait for each other at the end of a step, in place."""
        return self.world.start_all_reduce(tensor, self.sums if self.slack else None) if self.size > 1 else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """That sum, once it is there."""
        self.world.wait(self.start_all_reduce(tensor))
        return tensor

    def begin_passing(self) -> None:
        """Wait for what a rank that only attacks has not received `slack` steps later."""
        if self.slack and self.targets:
            while len(self._under_way) >= self.slack:
                self._wait_for_oldest()
            self._under_way.append([])

    def start_passing(self, total: Tensor) -> list[dist.Work]:
        """Begin to send a sum to ranks of this lane that only attack, or to receive it there, in place.

        Returns:
            What has to be waited for in this step. Where others may lag, a copy is sent and kept until they have it.
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
        self._under_way[-1].extend((work, sent) for work in works)
        return []

    def drain(self) -> None:
        """Wait until everything was received that was sent."""
        while self._under_way:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._under_way.popleft():
            self.world.wait(work)


def recipients(layout: Layout, world: World, ahead: int) -> Recipients:
    """Who adds gradients up in a layout. Every rank must call it, since it may make groups.

    Args:
        layout: who does what.
        world: the processes.
        ahead: steps between generating a twin and learning from it: by one less, ranks that only attack may lag.
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
