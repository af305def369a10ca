"""Twins and weights from rank to rank, sent while the ranks compute.

    learning rank ──► weights of step t ──► attack rank ──► twin(t + τ, k) ──► rank that learns from it in step t + τ
    clean rank    ──► twin(t, k) of `recycled` ──► rank that learns from it in step t + 1

A twin is a pure function, so what was not sent (in the first steps of an epoch or after a resume) is evaluated by the
rank that needs it, to the same bits. Every rank communicates in this order in each step, so that two ranks never wait
for each other, even if each does one operation at a time:

1. weights, from a learning rank of each lane to the ranks of the lane that only attack
2. twins, by chunk: those that are generated in this step, if by an attack
3. all_reduce of the gradients over the learning ranks, during the last backward pass
4. all_reduce of BatchNorm statistics, losses, and requests to stop, over the learning ranks
5. twins that the clean backward passes left behind, by chunk

Receives are posted in the step in which a twin is sent, not in the one that needs it: with a delay of 2 or more, the
sender would wait for a rank that waits for others. Sent buffers are kept until they were received. Weights and twins
have a process group each, so they never queue behind gradients or each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.algorithm import ConAdv, Recycled
from conadv.core.batch import Batch, Chunked
from conadv.core.roles import Role
from conadv.core.state import State
from conadv.core.step import span
from conadv.core.twins import LeftTwins, Local

from .layout import Layout
from .world import World, flat, unflatten


@dataclass(frozen=True)
class Wire:
    """The images of a chunk of twins as a message of bytes, with one more byte for a note."""

    shape: tuple[int, ...]
    """Of the images of a chunk."""
    dtype: torch.dtype
    as_bytes: bool
    """Whether pixels are multiples of 1/255, so that one byte per pixel is exact."""

    @classmethod
    def of(cls, batch: Batch | Chunked, chunk_size: int, method: Any) -> Wire:
        """The message format of the twins of a method, which every rank finds in a batch of its own."""
        if isinstance(batch, Chunked):
            raise ValueError("a Team needs batches that are whole: yield (images, labels) or a conadv.Batch")
        images, as_bytes = batch.images, batch.images.dtype == torch.uint8
        dtype = next(method._step.model.parameters()).dtype if as_bytes else images.dtype
        exact = method.attack.exact_as_bytes(from_images=isinstance(method, Recycled))
        return cls((chunk_size, *images.shape[1:]), dtype, as_bytes=as_bytes and exact)

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return torch.Size(self.shape).numel() * (1 if self.as_bytes else self.dtype.itemsize) + 1

    def pack(self, images: Tensor, note: int = 0) -> Tensor:
        images = images.detach()
        images = images.mul(255).round_().to(torch.uint8) if self.as_bytes else images.to(self.dtype)
        return with_note(images.contiguous().flatten().view(torch.uint8), note)

    def unpack(self, message: Tensor) -> Tensor:
        images = message[:-1].to(self.dtype).div_(255) if self.as_bytes else message[:-1].clone().view(self.dtype)
        return images.view(self.shape)

    def received(self, twin: Batch) -> Batch:
        """A twin that was generated here, with the bits that it has after it was sent."""
        return replace(twin, images=self.unpack(self.pack(twin.images)))


def with_note(message: Tensor, note: int) -> Tensor:
    """A message of bytes with a last one: the signal that asks the receiver to stop, or 0."""
    return torch.cat([message, message.new_full((1,), note)])


class Post:
    """Sends and receives the twins of one rank, chunk by chunk.

    Args:
        layout: which ranks generate twins, and which learn from them.
        world: the ranks, all of which must make one.
        method: the method of this rank, after it has joined the others.
        chunks: how many chunks a global batch has.
        wire: the message format; None: `wire` is set before the first twin.
    """

    def __init__(self, layout: Layout, world: World, method: ConAdv | Recycled, chunks: int, wire: Wire | None) -> None:
        self.wire = wire
        self.ahead = layout.ahead(method.delay)
        """Steps between generating a twin and learning from it."""
        self.note = torch.zeros(1, dtype=torch.uint8, device=world.device)
        """The largest note that came with the twins of this step."""
        self.place = method._step.place
        self._layout, self._method, self._chunks = layout, method, chunks
        self._group = world.new_group()
        self._inbox: dict[tuple[int, int], tuple[Any, Tensor]] = {}  # by batch and chunk
        self._sent: deque[tuple[int, Any, Tensor]] = deque()

    @property
    def learns(self) -> bool:
        """Whether twins are sent to this rank, and not by it."""
        return Role.ADV in self.place.role

    @property
    def format(self) -> Wire:
        assert self.wire is not None
        return self.wire

    @property
    def owned(self) -> int:
        """The number of messages that this rank keeps in memory."""
        return len(self._inbox) + len(self._sent)

    def expect(self, batch: int) -> None:
        """Post the receives of the twins of a batch that this rank learns from; others generate them now."""
        assert self.place.chunks is not None
        for k in range(self.place.chunks):
            if self._method._step.has_twin(batch, k):
                buffer = torch.empty(self.format.size, dtype=torch.uint8, device=self.note.device)
                source = self._layout.owner(self._layout.maker(), self.place.first_chunk + k, self._chunks)
                self._inbox[batch, k] = dist.irecv(buffer, source, group=self._group), buffer

    def take(self, batch: int, k: int) -> Tensor | None:
        """The twins of chunk k of this rank; None if they were not sent."""
        if (batch, k) not in self._inbox:
            return None
        with span("hand-off"):
            work, message = self._inbox.pop((batch, k))
            work.wait()
            self.note = torch.maximum(self.note, message[-1:])
            return self.format.unpack(message)

    def send(self, batch: int, k: int, images: Tensor, note: int = 0) -> None:
        """Send the twins of chunk k of this rank to the one that learns from them."""
        with span("hand-off"):
            while self._sent and self._sent[0][0] < batch:  # a rank that took a step since then has received it
                self._sent.popleft()[1].wait()
            message = self.format.pack(images, note)
            target = self._layout.owner(Role.ADV, self.place.first_chunk + k, self._chunks)
            self._sent.append((batch, dist.isend(message, target, group=self._group), message))

    def drain(self) -> None:
        """Wait for every message in flight, and drop it; all ranks must have taken the same number of steps."""
        for work in (*(work for _, work, _ in self._sent), *(work for work, _ in self._inbox.values())):
            work.wait()
        self._sent.clear()
        self._inbox.clear()


class Mail(Local):
    """The twins of `ConAdv` on a rank that learns: sent by others, or else evaluated here."""

    def __init__(self, model: nn.Module, method: ConAdv, post: Post) -> None:
        super().__init__(model, method.delay, method.twin)
        self._post = post
        self._end = 0  # the first batch that no rank attacks ahead
        self._updates: deque[int] = deque(maxlen=post.ahead + 1)  # updates of the weights before each of the last steps

    def open(self, end: int) -> None:
        """Begin an epoch, or a run: all batches before `end` come, of which others attack all but the first."""
        self._post.drain()
        self._end = end

    def begin(self, t: int, ahead: Any) -> None:
        super().begin(t, None)
        before = self._updates[-1] if self._updates else 0
        self._updates.append(before + (not self.same_update))
        if self._post.learns and t + self._post.ahead < self._end:
            self._post.expect(t + self._post.ahead)

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        if not self._post.learns:  # another rank does
            twin = super().take(t, k, chunk)
            self._post.send(t, k, twin.images)
            return twin
        images = self._post.take(t, k)
        # With an update left out since, as by a GradScaler, they are of other weights than one process takes.
        if images is None or self._updates[-1] - self._updates[0] != self._post.ahead:
            return self._post.format.received(super().take(t, k, chunk))
        return Batch(images, chunk.labels, extra=chunk.extra)

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self._updates.clear()
        super().load(about, tensors)


class Passed(LeftTwins):
    """The twins of `Recycled` that the clean ranks of a lane send to those that learn from them."""

    def __init__(self, model: nn.Module, method: Recycled, post: Post) -> None:
        super().__init__(model, method.twin)
        self._post = post
        self._unsent: int | None = None  # the step whose twins were not exchanged yet
        self._posted: int | None = None  # the step whose twins are coming
        self._known: dict[tuple[int, int], Batch] = {}  # what else belongs to them, by step and chunk

    def begin(self, t: int, ahead: Any) -> None:
        self.exchange()
        super().begin(t, ahead)
        self._unsent = t
        self._known = {key: batch for key, batch in self._known.items() if key[0] == t - 1}

    def exchange(self) -> None:
        """Send the twins of the last step, or post their receives, unless that was done."""
        t, self._unsent = self._unsent, None
        if t is None:
            return
        if self._post.learns:
            self._post.expect(t)
            self._posted = t
            return
        for k, twin in zip(sorted(self._coming), self._arrived(), strict=True):
            self._post.send(t, k, twin.images)
        self._coming = {}

    def remember(self, t: int, k: int, chunk: Batch) -> None:
        self._known[t, k] = chunk

    def source(self, t: int) -> int:
        return t - 1 if self._posted == t - 1 else super().source(t)

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        images = self._post.take(t - 1, k)
        return super().take(t, k, chunk) if images is None else replace(self._known[t - 1, k], images=images)

    def items(self) -> list[Batch]:
        """The twins that wait for the next step, in order; waits for those that are still on their way."""
        self.exchange()
        known, self._known, self._posted = self._known, {}, None
        for (t, k), batch in known.items():
            if (images := self._post.take(t, k)) is not None:
                self.adopt([replace(batch, images=images)])
        return super().items()

    def reset(self) -> None:
        super().reset()
        self._known, self._unsent, self._posted = {}, None, None


class Weights:
    """Sends the weights of each step to ranks that only attack, without waiting, or receives them there.

    Such a rank may fall behind by `ahead`: as many steps as pass until its twins are needed.
    """

    def __init__(self, layout: Layout, world: World, model: nn.Module, ahead: int) -> None:
        followers = layout.followers()
        self._source = followers.get(world.rank)
        self._targets = [rank for rank, source in followers.items() if source == world.rank]
        self._model, self._ahead = model, ahead
        self._group = world.new_group() if followers else None
        self._sent: deque[tuple[list[Any], Tensor]] = deque()

    def send(self, note: int = 0) -> None:
        """Send the current weights; `note`: not 0 if the run stops and no step follows."""
        if self._targets:
            self._wait_until_left(self._ahead)  # twins with older weights were learnt from
            message = with_note(flat([*self._model.parameters(), *self._model.buffers()]), note)
            works = [dist.isend(message, target, group=self._group) for target in self._targets]
            self._sent.append((works, message))

    def receive(self) -> int:
        """Wait for the weights of a step, and copy them into the model; returns the note."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        message = torch.empty(size + 1, dtype=torch.uint8, device=tensors[0].device)
        with span("hand-off"):
            work: Any = dist.irecv(message, self._source, group=self._group)
            work.wait()
        unflatten(message[:-1], tensors)
        return int(message[-1])

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        self._wait_until_left(0)

    def _wait_until_left(self, messages: int) -> None:
        while len(self._sent) > messages:
            for work in self._sent.popleft()[0]:
                work.wait()
