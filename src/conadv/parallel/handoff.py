"""The hand-off between ranks of a lane: twins with their labels, sent and received during the computation.

maker:  put ──► pack ──► isend (owned until it is done)          taker:  irecv (posted ahead) ──► unpack ──► take
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from conadv.core.handoff import Twin
from conadv.core.roles import Role

from .collectives import World
from .traffic import Message, Traffic
from .wire import Wire

# Added to the note of a rank that asks for a checkpoint; signals have smaller numbers.
SAVE = 128


class RankHandoff:
    """Twins from the ranks of a lane that make them to those that learn from them, in the order of their chunks.

    At the end of a step, the messages of `ahead` steps are under way (or fewer, in the last steps), and just as many
    receives are posted: a run that stops there can `drain` the hand-off, and no message is left without a receiver.

    The message of a step's last chunk comes after the start of its gradient sums, on both sides (`end_step`): where
    twins come with the clean gradient, it exists only then. Twins of the same step (`ahead` 0) are needed before.

    Args:
        wire: how the twins of a chunk cross; None: it is set before the first twin.
        traffic: which chunks go from where to where.
        group: the process group of the messages.
        world: the processes.
    """

    def __init__(self, wire: Wire | None, traffic: Traffic, group: dist.ProcessGroup, world: World) -> None:
        self.wire = wire
        self.note = 0  # sent with each twin by a rank that others may not wait for: the signal that asked it to stop
        self.asked: Tensor | None = None  # the largest note that came in this step
        self.all_late = False  # one backward pass brings all twins of a step, so that none crosses before its sums
        self._traffic = traffic
        self._group = group
        self._world = world
        self._ahead = traffic.ahead
        self._announced: list[tuple[Sequence[int], int]] = []  # numbers of batches, and how many of them are primed
        # Where twins are made
        self._put = 0  # batches whose messages were planned
        self._to_put: deque[Message] = deque()
        self._held: tuple[Message, Tensor] | None = None  # the message that waits for the gradient sums
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()
        # Where they are taken
        self._taken = self._posted = 0  # batches that were begun
        self._to_take: deque[Message] = deque()
        self._to_post: deque[Message] = deque()
        self._inbox: dict[tuple[int, int], tuple[dist.Work | None, Tensor]] = {}

    def announce(self, start: int, stop: int) -> None:
        """Say that the steps from `start` to `stop` will be taken; every rank of the lane says the same.

        Where twins come with the clean gradient, a step learns from those of the batch before, and the first one from
        its own; those of the last step wait for the next one.
        """
        if self._traffic.layout.maker() == Role.CLEAN:
            if not self._announced:
                self._announced.append((range(max(start - 1, 0), max(start, 1)), 1))
            self._announced.append((range(start, stop), 0))
        else:
            self._announced.append((range(start, stop), self._ahead))

    def put(self, twin: Twin) -> None:
        self._send_held()
        while not self._to_put:
            self._to_put.extend(self._traffic.sent(*self._planned(self._put)))
            self._put += 1
        message = self._to_put.popleft()
        self._held = message, self._format.pack(twin, self.note)
        if not message.is_late:
            self._send_held()

    def take(self) -> Twin:
        if not self._to_take:
            self._begin_taking()
        message = self._to_take.popleft()
        work, buffer = self._inbox.pop((message.place, message.chunk))
        # Within a step the next message may come while this one is learnt from; late ones come after its gradients.
        self._post(len(self._to_post) if not self._to_take else 1)
        with self._world.waiting():
            if work is not None:
                work.wait()
        self.asked = buffer[-1].clone() if self.asked is None else torch.maximum(self.asked, buffer[-1])
        return self._format.unpack(buffer)

    def end_step(self) -> None:
        """Send or await the twins of the step's last chunk; every gradient sum of the step was started."""
        self._send_held()
        self._post(len(self._to_post), late=True)
        self._post_primed()

    def clear(self) -> None:
        raise AssertionError("messages in flight between ranks cannot be cancelled")

    def arrived(self) -> list[Tensor]:
        """The messages that this rank has not taken yet, in their order, after waiting for them; they stay."""
        for key, (work, buffer) in self._inbox.items():
            self._world.wait(work)
            self._inbox[key] = None, buffer
        return [self._inbox[key][1] for key in sorted(self._inbox)]

    def adopt(self, messages: Mapping[int, Tensor]) -> None:
        """Put the twins of the first batch that was announced in flight without sending them.

        Args:
            messages: by chunk, of all chunks that have twins; every rank gets the same.
        """
        for message in self._traffic.received(*self._planned(0)):
            self._inbox[message.place, message.chunk] = None, messages[message.chunk].to(self._world.device)
        self._put = self._posted = 1

    def cancel(self) -> None:
        """Give up the steps that were announced and not taken: what is under way is received and, except where it comes
        with the clean gradient and so belongs to the next step, forgotten."""
        begun = max(self._put, self._posted)
        if self._traffic.layout.maker() != Role.CLEAN:
            self.drain()
            self._taken = self._posted = self._put = begun
        kept: list[tuple[Sequence[int], int]] = []
        for batches, primed in self._announced:
            kept.append((batches[:begun], primed))
            begun -= len(batches[:begun])
        self._announced = kept

    def drain(self) -> None:
        """Wait for every message that is under way."""
        self.end_step()
        for work in (*(work for _, work, _ in self._sent), *(work for work, _ in self._inbox.values())):
            self._world.wait(work)
        self._sent.clear()
        self._inbox.clear()

    @property
    def owned(self) -> int:
        """Messages that are held in memory."""
        return len(self._sent) + len(self._inbox)

    @property
    def _format(self) -> Wire:
        assert self.wire is not None
        return self.wire

    @property
    def _total(self) -> int:
        return sum(len(batches) for batches, _ in self._announced)

    def _planned(self, place: int) -> tuple[int, int, bool]:
        within = place
        for batches, primed in self._announced:
            if within < len(batches):
                return batches[within], place, within < primed
            within -= len(batches)
        raise AssertionError("more twins than the steps that were announced have")

    def _send_held(self) -> None:
        if self._held is None:
            return
        message, buffer = self._held
        # With one more in flight, the oldest was received before the last exchange of the ranks: no wait here.
        while self._sent and self._sent[0][0] < message.place - self._ahead:
            with self._world.waiting():
                self._sent.popleft()[1].wait()  # Gloo's own sign of completion appears only then
        self._sent.append((message.place, self._world.start_send(buffer, message.target, self._group), buffer))
        self._held = None

    def _begin_taking(self) -> None:
        """Plan the messages of a step: those to take, and those to post of the batch that comes `ahead` steps later."""
        self._post_primed()
        self._to_take.extend(self._traffic.received(*self._planned(self._taken)))
        assert self._to_take, "twins are shared evenly, so that every rank has some in each step"
        self._taken += 1
        if self._posted < self._total:
            self._plan_posts()
        if not self._ahead:
            self._post(1)

    def _post_primed(self) -> None:
        """Post what was put in flight before a first step."""
        while self._posted < min(self._taken + self._ahead, self._total):
            self._plan_posts()
            self._post(len(self._to_post), late=True)

    def _plan_posts(self) -> None:
        coming = self._traffic.received(*self._planned(self._posted))
        self._to_post.extend(sorted(coming, key=lambda message: message.is_late))
        self._posted += 1

    def _post(self, count: int, late: bool = False) -> None:
        for _ in range(count):
            if not self._to_post or ((self.all_late or self._to_post[0].is_late) and not late):
                return
            message = self._to_post.popleft()
            buffer = torch.empty(self._format.size, dtype=torch.uint8, device=self._world.device)
            work = self._world.start_receive(buffer, message.source, self._group)
            self._inbox[message.place, message.chunk] = work, buffer


def between_ranks(traffic: Traffic, world: World, wire: Wire | None) -> RankHandoff | None:
    """The hand-off of this rank; None where a rank learns from the twins that it makes. Every rank must call it.

    Args:
        traffic: which chunks go from where to where.
        world: the processes.
        wire: how the twins of a chunk cross; None: it is not known yet.
    """
    if not traffic.layout.hands_over:
        return None
    # A group of its own, so that twins never wait behind gradients.
    return RankHandoff(wire, traffic, world.new_group(), world)
