"""Twins and weights from rank to rank, sent while the ranks compute.

    learning rank ──► weights of step t ──► attack rank ──► twin(t + τ, k) ──► rank that learns from it in step t + τ
    clean rank    ──► twin(t, k) of `recycled` ──► rank that learns from it in step t + 1

A twin is a pure function, so what was not sent (in the first steps of an epoch or after a resume) is evaluated by the
rank that needs it, to the same bits. Every rank communicates in this order in each step, so that two ranks never wait
for each other, even if each does one operation at a time:

1. weights, from a learning rank of each lane to the ranks of the lane that only attack
2. twins, by chunk: those that are generated in this step, if by an attack
3. all_reduce of the gradients over the learning ranks, during the last backward pass
4. twins that the clean backward passes left behind, by chunk
5. all_reduce of BatchNorm statistics, losses, and requests to stop, over the learning ranks

Receives are posted in the step in which a twin is sent, not in the one that needs it: with a delay of 2 or more, the
sender would wait for a rank that waits for others. Weights and twins have a process group each, so they never queue
behind gradients or each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.algorithm import ConAdv, Recycled
from conadv.core.batch import Batch, Chunked
from conadv.core.twins import LeftTwins, Local
from conadv.roles import Place, Role
from conadv.wrappers import span

from .layout import Layout
from .world import World, flat, unflatten


@dataclass(frozen=True)
class Wire:
    """The images of a chunk of twins as a message of bytes."""

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
        return torch.Size(self.shape).numel() * (1 if self.as_bytes else self.dtype.itemsize)

    def pack(self, images: Tensor) -> Tensor:
        images = images.detach()
        images = images.mul(255).round_().to(torch.uint8) if self.as_bytes else images.to(self.dtype)
        return images.contiguous().flatten().view(torch.uint8)

    def unpack(self, message: Tensor) -> Tensor:
        images = message.to(self.dtype).div_(255) if self.as_bytes else message.clone().view(self.dtype)
        return images.view(self.shape)

    def received(self, twin: Batch) -> Batch:
        """A twin that was generated here, with the bits that it has after it was sent."""
        return replace(twin, images=self.unpack(self.pack(twin.images)))


class Mailbox:
    """Messages of bytes between ranks, kept until they were received. Every rank must make one.

    They have a process group of their own, if any rank sends one (`exists`).
    """

    def __init__(self, world: World, exists: bool) -> None:
        self._group, self._device = world.new_group() if exists else None, world.device
        self._sent: deque[tuple[int, Any, Tensor]] = deque()  # with the step
        self._coming: dict[Any, tuple[Any, Tensor]] = {}

    def send(self, message: Tensor, target: int, step: int) -> None:
        self._sent.append((step, dist.isend(message, target, group=self._group), message))

    def expect(self, key: Any, size: int, source: int) -> None:
        """Post the receive of a message of so many bytes."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._coming[key] = dist.irecv(buffer, source, group=self._group), buffer

    def take(self, key: Any) -> Tensor | None:
        """Wait for a message that is expected; None if it is not."""
        if key not in self._coming:
            return None
        with span("hand-off"):
            work, message = self._coming.pop(key)
            work.wait()
            return message

    def forget(self, before: int) -> None:
        """Wait until the messages of steps before this one were received, and drop them."""
        while self._sent and self._sent[0][0] < before:
            self._sent.popleft()[1].wait()

    def drain(self) -> None:
        """Wait for every message in flight, and drop it; all ranks must have taken the same number of steps."""
        for work in (*(work for _, work, _ in self._sent), *(work for work, _ in self._coming.values())):
            work.wait()
        self._sent.clear()
        self._coming.clear()


class Post:
    """All messages of one rank: twins, chunk by chunk, and the weights of each step, for ranks that only attack.

    Such a rank may fall behind by `delay` - 1 steps before others wait for its twins. Every rank must make one.
    `wire` is the message format of twins, and may be set later, before the first.
    """

    def __init__(
        self, layout: Layout, world: World, place: Place, model: nn.Module, delay: int, wire: Wire | None
    ) -> None:
        followers = layout.followers()
        self.twins = Mailbox(world, exists=layout.hands_over)
        self._weights = Mailbox(world, exists=bool(followers))
        self._source = followers.get(world.rank, 0)
        self._targets = [rank for rank, source in followers.items() if source == world.rank]
        self._layout, self._place, self._model, self._delay, self.wire = layout, place, model, delay, wire
        self.learns = Role.ADV in place.role
        """Whether twins are sent to this rank, and not by it."""

    @property
    def format(self) -> Wire:
        assert self.wire is not None
        return self.wire

    def expect(self, batch: int, k: int) -> None:
        """Post the receive of the twins of chunk k of this rank; another one generates them in this step."""
        self.twins.expect((batch, k), self.format.size, self._owner(self._layout.maker(), k))

    def take(self, batch: int, k: int) -> Tensor | None:
        """The twins of chunk k of this rank; None if they were not sent."""
        message = self.twins.take((batch, k))
        return None if message is None else self.format.unpack(message)

    def send(self, batch: int, k: int, images: Tensor) -> None:
        """Send the twins of chunk k of this rank to the one that learns from them."""
        with span("hand-off"):
            self.twins.forget(before=batch)  # a rank that took a step since then has received them
            self.twins.send(self.format.pack(images), self._owner(Role.ADV, k), batch)

    def send_weights(self, step: int, note: int = 0) -> None:
        """Send the current weights, without waiting; `note`: not 0 if the run stops, by this signal."""
        if self._targets:
            self._weights.forget(before=step - self._delay)  # twins with older weights were learnt from
            weights = flat([*self._model.parameters(), *self._model.buffers()])
            message = torch.cat([weights, weights.new_full((1,), note)])
            for target in self._targets:
                self._weights.send(message, target, step)

    def receive_weights(self) -> int:
        """Wait for the weights of a step, and copy them into the model; returns the note."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._weights.expect("weights", size + 1, self._source)
        message = self._weights.take("weights")
        assert message is not None
        unflatten(message[:-1], tensors)
        return int(message[-1])

    def drain(self) -> None:
        """Wait for every message in flight; all ranks must have taken the same number of steps."""
        self._weights.drain()
        self.twins.drain()

    def _owner(self, duty: Role, k: int) -> int:
        """The rank that has a duty for chunk k of this rank."""
        assert self._place.total is not None
        return self._layout.owner(duty, self._place.first_chunk + k, self._place.total)


class Mail(Local):
    """The twins of `ConAdv` on a rank that learns from them: sent by others, or else evaluated here."""

    def __init__(self, model: nn.Module, method: ConAdv, post: Post) -> None:
        super().__init__(model, method.delay, method.twin)
        self._post, self._step = post, method._step
        self._end = 0  # the first batch that no rank attacks ahead
        self._in_a_row = 0  # how many steps, up to this one, each came after an update of the weights

    def open(self, end: int) -> None:
        """Begin an epoch, or a run: all batches before `end` come, of which others attack all but the first `delay`."""
        self._post.twins.drain()
        self._end = end

    def begin(self, t: int, ahead: Any) -> None:
        super().begin(t, None)
        self._in_a_row = 0 if self.same_update else self._in_a_row + 1
        later, count = t + self._delay, self._step.place.chunks
        assert count is not None
        for k in range(count if later < self._end else 0):
            if self._step.has_twin(later, k):
                self._post.expect(later, k)

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        images = self._post.take(t, k)
        # Where a loop leaves out an update, they are of other weights than one process takes.
        if images is None or self._in_a_row < self._delay:
            return self._post.format.received(super().take(t, k, chunk))
        return Batch(images, chunk.labels, extra=chunk.extra)


class Passed(LeftTwins):
    """The twins of `Recycled` that the clean ranks of a lane send to those that learn from them.

    The latter leave the chunk itself behind in a step, and get the images of its twin in the next.
    """

    def __init__(self, model: nn.Module, method: Recycled, post: Post) -> None:
        super().__init__(model, method.twin)
        self._post, self._step = post, method._step

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        return self._received(t - 1, k, super().take(t, k, chunk))

    def end(self) -> None:
        """Send the twins that this step has left behind, or post their receives."""
        for k, twin in zip(list(self._coming), self._arrived(), strict=True):
            if self._post.learns:
                self._post.expect(self._step.t, k)
            else:
                self._post.send(self._step.t, k, twin.images)
                del self._coming[k]

    def items(self) -> list[Batch]:
        """The twins that wait for the next step, in order; waits for those that are still on their way."""
        for k, chunk in zip(list(self._coming), self._arrived(), strict=True):
            self._coming[k] = self._received(self._step.t - 1, k, chunk)
        return super().items()

    def _received(self, t: int, k: int, chunk: Batch) -> Batch:
        """A chunk with the images of its twin, if they were sent."""
        images = self._post.take(t, k)
        return chunk if images is None else replace(chunk, images=images)
