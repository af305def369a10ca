"""The hand-off between two ranks of a lane: twins with their labels, sent and received during the computation.

maker:  put ──► pack ──► isend (owned until it is done)          taker:  irecv (posted ahead) ──► unpack ──► take
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from conadv.core.handoff import Twin
from conadv.core.roles import Role

from .collectives import World
from .layout import Layout


@dataclass(frozen=True)
class Wire:
    """How a twin crosses from rank to rank: one message of bytes, of a size that both sides know."""

    images: int
    """Images a chunk."""
    shape: tuple[int, ...]
    """The shape of one image."""
    dtype: torch.dtype
    """The type of the images on either side."""
    as_bytes: bool
    """Whether pixels are whole numbers of 255ths, so that a byte each loses nothing."""
    classes: int | None = None
    """Numbers per label where labels are shares of the classes, as float32; None: class numbers, as int64."""

    @property
    def size(self) -> int:
        pixel = 1 if self.as_bytes else self.dtype.itemsize
        return self._label_bytes + self.images * pixel * torch.Size(self.shape).numel()

    @property
    def _label_bytes(self) -> int:
        return self.images * (8 if self.classes is None else 4 * self.classes)

    def pack(self, twin: Twin) -> Tensor:
        images = twin.images.detach()
        images = images.mul(255).round_().to(torch.uint8) if self.as_bytes else images.to(self.dtype)
        assert twin.labels.is_floating_point() == (self.classes is not None), "labels of the kind that was announced"
        parts = (twin.labels.to(torch.int64 if self.classes is None else torch.float32), images)
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])

    def unpack(self, message: Tensor) -> Twin:
        labels, images = message.split([self._label_bytes, self.size - self._label_bytes])
        # A clone is aligned, wherever its bytes lay in the message.
        pixels = images.to(self.dtype).div_(255) if self.as_bytes else images.clone().view(self.dtype)
        numbers = labels.clone().view(torch.int64 if self.classes is None else torch.float32)
        shape = (self.images,) if self.classes is None else (self.images, self.classes)
        return Twin(pixels.view(self.images, *self.shape), numbers.view(shape))


class RankHandoff:
    """Twins from one rank of a lane to another, in the order in which they were put.

    At the end of a step, the messages of `ahead` steps are under way (or fewer, in the last steps), and just as many
    receives are posted: a run that stops there can `drain` the hand-off, and no message is left without a receiver.

    The message of a step's last chunk comes after the start of its gradient sums, on both sides (`end_step`): where
    twins come with the clean gradient, it exists only then. Twins of the same step (`ahead` 0) are needed before.
    """

    def __init__(
        self,
        wire: Wire,
        source: int,
        target: int,
        chunks: int,
        ahead: int,
        total: int,
        group: dist.ProcessGroup,
        world: World,
    ) -> None:
        self._wire = wire
        self._source, self._target = source, target
        self._group = group
        self._world = world
        self._chunks = chunks
        self._window = ahead * chunks
        # With one more in flight, the oldest was received before the last exchange of the ranks: no wait here.
        self._most_owned = (ahead + 1) * chunks
        self._to_post = total  # messages of the whole run that are not posted yet
        self._taken = self._made = 0
        self._held: Tensor | None = None  # the message that waits for the gradient sums
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: deque[tuple[dist.Work, Tensor]] = deque()

    def put(self, twin: Twin) -> None:
        self._send_held()
        self._held = self._wire.pack(twin)
        self._made += 1
        primed = self._made <= self._window
        if primed or not self._window or self._made % self._chunks:
            self._send_held()

    def take(self) -> Twin:
        self._post(max(1, self._window))
        work, message = self._posted.popleft()
        self._taken += 1
        # Within a step the next message may come while this one is learnt from; that of the last chunk comes later.
        is_last = self._taken % self._chunks == 0
        self._post(max(1, self._window) - is_last)
        with self._world.waiting():
            work.wait()
        return self._wire.unpack(message)

    def end_step(self) -> None:
        """Send or await the twins of the step's last chunk; every gradient sum of the step was started."""
        self._send_held()
        if self._world.rank == self._target:
            self._post(self._window)

    def clear(self) -> None:
        raise AssertionError("messages in flight between ranks cannot be cancelled")

    def drain(self) -> None:
        """Wait for every message that is under way."""
        self.end_step()
        for work, _ in (*self._sent, *self._posted):
            self._world.wait(work)
        self._sent.clear()
        self._posted.clear()

    def _send_held(self) -> None:
        if self._held is None:
            return
        if len(self._sent) == self._most_owned:
            with self._world.waiting():
                self._sent.popleft()[0].wait()  # Gloo's own sign of completion appears only then
        self._sent.append((self._world.start_send(self._held, self._target, self._group), self._held))
        self._held = None

    def _post(self, count: int) -> None:
        while len(self._posted) < count and self._to_post:
            message = torch.empty(self._wire.size, dtype=torch.uint8, device=self._world.device)
            self._posted.append((self._world.start_receive(message, self._source, self._group), message))
            self._to_post -= 1


def between_ranks(layout: Layout, world: World, twins: int, ahead: int, steps: int, wire: Wire) -> RankHandoff | None:
    """The hand-off of this rank, whose twins are made `ahead` steps before their use.

    Args:
        layout: says who sends to whom.
        world: the processes.
        twins: chunks with twins in a step of a lane.
        ahead: steps between generating a twin and learning from it.
        steps: that the run will take.
        wire: how a chunk's twins cross.

    Returns:
        None where a lane has only one rank to make and take twins.
    """
    route = layout.route(world.rank)
    if route is None:
        return None
    # A group of its own, so that twins never wait behind gradients.
    group = world.new_group()
    # Where twins come with the clean gradient, those of the last step are generated but never used.
    spare = ahead if layout.maker() == Role.CLEAN else 0
    return RankHandoff(wire, *route, twins, ahead, (steps + spare) * twins, group, world)
