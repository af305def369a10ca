"""The hand-off between ranks of a lane: twins with their labels are sent and received while the ranks compute.

maker:  put ──► pack ──► isend (buffer kept until done)          taker:  irecv (posted ahead) ──► unpack ──► take
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from conadv.core.batch import Batch
from conadv.core.roles import Role
from conadv.core.step import span

from .collectives import World
from .traffic import Message, Traffic
from .wire import Wire

# Added to the note of a rank that requests a checkpoint; signals have smaller numbers.
SAVE = 128


class RankHandoff:
    """Sends twins from the ranks of a lane that generate them to those that learn from them, in the order of chunks.

    At the end of a step, the messages of the next `ahead` steps are in flight (fewer in the last steps), and a receive
    is posted for each of them. So a run can stop there and `drain` the hand-off.

    The message of a step's last chunk is sent and received after the start of the step's gradient sums (`end_step`):
    if twins come from the clean backward pass, it exists only then. Twins for the same step (`ahead` 0) come before.

    Args:
        wire: the message format; None: it is set before the first twin.
        traffic: which messages this rank sends and receives.
        group: the process group of the messages.
        world: the ranks.
    """

    def __init__(self, wire: Wire | None, traffic: Traffic, group: dist.ProcessGroup, world: World) -> None:
        self.wire = wire
        self.received_note: Tensor | None = None
        """The largest note that was received in this step."""
        self._note = 0
        self._all_late = False
        self._traffic = traffic
        self._group = group
        self._world = world
        self._ahead = traffic.ahead
        self._announced: list[tuple[Sequence[int], int]] = []  # numbers of batches, and how many of them are primed
        # On ranks that generate twins
        self._put = 0  # batches whose messages were planned
        self._to_put: deque[Message] = deque()
        self._held: tuple[Message, Tensor] | None = None  # the message that waits for the gradient sums
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()
        # On ranks that learn from them
        self._taken = self._posted = 0  # batches whose messages were planned
        self._to_take: deque[Message] = deque()
        self._to_post: deque[Message] = deque()
        self._inbox: dict[tuple[int, int], tuple[dist.Work | None, Tensor]] = {}

    def announce(self, start: int, stop: int) -> None:
        """Announce the steps from `start` to `stop`; every rank of the lane must announce the same.

        If twins come from the clean backward pass, a step learns from those of the batch before, and the first step
        from its own; those of the last step stay in flight.
        """
        if self._traffic.layout.maker() == Role.CLEAN:
            if not self._announced:
                self._announced.append((range(max(start - 1, 0), max(start, 1)), 1))
            self._announced.append((range(start, stop), 0))
        else:
            self._announced.append((range(start, stop), self._ahead))

    def begin_step(self, note: int, all_late: bool) -> None:
        """Begin a step.

        Args:
            note: a byte to send with each twin: the signal that asked a rank that may lag to stop, plus `SAVE`.
            all_late: whether no twin exists before the gradient sums, because there is only one backward pass.
        """
        self._note, self._all_late = note, all_late
        self.received_note = None

    def put(self, twin: Batch) -> None:
        with span("hand-off"):
            self._send_held()
            while not self._to_put:
                self._to_put.extend(self._traffic.sent(*self._planned(self._put)))
                self._put += 1
            message = self._to_put.popleft()
            self._held = message, self._format.pack(twin, self._note)
            if not message.is_late:
                self._send_held()

    def take(self) -> Batch:
        with span("hand-off"):
            if not self._to_take:
                self._begin_taking()
            message = self._to_take.popleft()
            work, buffer = self._inbox.pop((message.place, message.chunk))
            # The next message may arrive while this one is learnt from; late messages come after the gradient sums.
            self._post(len(self._to_post) if not self._to_take else 1)
            self._world.order(work)
            note, before = buffer[-1], self.received_note
            self.received_note = note.clone() if before is None else torch.maximum(before, note)
            return self._format.unpack(buffer)

    def end_step(self) -> None:
        """Send the message of the step's last chunk or post its receive, after the start of all gradient sums."""
        self._send_held()
        self._post(len(self._to_post), late=True)
        self._post_primed()

    def arrived(self) -> list[Tensor]:
        """Wait for the messages that this rank has not taken yet, and return them in order; they stay in flight."""
        for key, (work, buffer) in self._inbox.items():
            self._world.wait(work)
            self._inbox[key] = None, buffer
        return [self._inbox[key][1] for key in sorted(self._inbox)]

    def adopt(self, messages: Mapping[int, Tensor]) -> None:
        """Put the twins of the first announced batch in flight without communication.

        Args:
            messages: by chunk, for all chunks with twins; the same on every rank.
        """
        for message in self._traffic.received(*self._planned(0)):
            self._inbox[message.place, message.chunk] = None, messages[message.chunk].to(self._world.device)
        self._put = self._posted = 1

    def cancel(self) -> None:
        """Cancel the announced steps that were not taken: receive and drop the twins in flight.

        Twins of the clean backward pass are kept, since they are for the next step whichever it is.
        """
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
        """Wait for every message in flight, and drop those that were received."""
        self.end_step()
        for work in (*(work for _, work, _ in self._sent), *(work for work, _ in self._inbox.values())):
            self._world.wait(work)
        self._sent.clear()
        self._inbox.clear()

    @property
    def owned(self) -> int:
        """The number of messages in memory."""
        return len(self._sent) + len(self._inbox)

    @property
    def _format(self) -> Wire:
        assert self.wire is not None
        return self.wire

    @property
    def _total(self) -> int:
        return sum(len(batches) for batches, _ in self._announced)

    def _planned(self, place: int) -> tuple[int, int, bool]:
        """Return the arguments of `Traffic.sent` and `Traffic.received` for the batch at this place."""
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
        # Messages this old were received before the last exchange of the ranks, so this does not block.
        while self._sent and self._sent[0][0] < message.place - self._ahead:
            self._world.order(self._sent.popleft()[1])  # Gloo's `is_completed` is true only after a wait
        self._sent.append((message.place, self._world.start_send(buffer, message.target, self._group), buffer))
        self._held = None

    def _begin_taking(self) -> None:
        """Plan the messages of a step: those to take, and the receives to post for the batch `ahead` steps later."""
        self._post_primed()
        self._to_take.extend(self._traffic.received(*self._planned(self._taken)))
        assert self._to_take, "twins are shared evenly, so that every rank has some in each step"
        self._taken += 1
        if self._posted < self._total:
            self._plan_posts()
        if not self._ahead:
            self._post(1)

    def _post_primed(self) -> None:
        """Post the receives of batches that are in flight before the first step."""
        while self._posted < min(self._taken + self._ahead, self._total):
            self._plan_posts()
            self._post(len(self._to_post), late=True)

    def _plan_posts(self) -> None:
        coming = self._traffic.received(*self._planned(self._posted))
        self._to_post.extend(sorted(coming, key=lambda message: message.is_late))
        self._posted += 1

    def _post(self, count: int, late: bool = False) -> None:
        """Post up to `count` receives; those of late messages only if `late` is set."""
        for _ in range(count):
            if not self._to_post or ((self._all_late or self._to_post[0].is_late) and not late):
                return
            message = self._to_post.popleft()
            buffer = torch.empty(self._format.size, dtype=torch.uint8, device=self._world.device)
            work = self._world.start_receive(buffer, message.source, self._group)
            self._inbox[message.place, message.chunk] = work, buffer


def between_ranks(traffic: Traffic, world: World, wire: Wire | None) -> RankHandoff | None:
    """Build the hand-off of this rank; None if ranks learn from their own twins. Every rank must call it.

    Args:
        traffic: which messages this rank sends and receives.
        world: the ranks.
        wire: the message format; None: not known yet.
    """
    if not traffic.layout.hands_over:
        return None
    # A process group of its own, so that twins never queue behind gradients.
    return RankHandoff(wire, traffic, world.new_group(), world)
