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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.algorithm import ConAdv, Recycled
from conadv.core.batch import Batch
from conadv.core.roles import Place, Role
from conadv.core.state import State
from conadv.core.step import span
from conadv.core.twins import LeftTwins, Local

from .layout import Layout
from .world import World, flat, unflatten

# Whether a chunk has twins, from the number of the batch, the first chunk of the lane, and its number within the lane.
HasTwins = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class Wire:
    """The images of a chunk of twins as a message of bytes, with one more byte for a note."""

    shape: tuple[int, ...]
    """Of the images of a chunk."""
    dtype: torch.dtype
    as_bytes: bool
    """Whether pixels are multiples of 1/255, so that one byte per pixel is exact."""

    @property
    def size(self) -> int:
        """Bytes of a message."""
        return torch.Size(self.shape).numel() * (1 if self.as_bytes else self.dtype.itemsize) + 1

    def pack(self, images: Tensor, note: int = 0) -> Tensor:
        images = images.detach()
        images = images.mul(255).round_().to(torch.uint8) if self.as_bytes else images.to(self.dtype)
        return torch.cat([images.contiguous().flatten().view(torch.uint8), _note(note, images.device)])

    def unpack(self, message: Tensor) -> Tensor:
        images = message[:-1].to(self.dtype).div_(255) if self.as_bytes else message[:-1].clone().view(self.dtype)
        return images.view(self.shape)

    def received(self, twin: Batch) -> Batch:
        """A twin that was generated here, with the bits that it has after it was sent."""
        return replace(twin, images=self.unpack(self.pack(twin.images)))


class Post:
    """Sends and receives the twins of one rank, chunk by chunk.

    Args:
        layout: which ranks generate twins, and which learn from them.
        world: the ranks, all of which must make one.
        chunks: how many chunks a global batch has.
        has_twins: which of them have twins.
        delay: age of the weights that twins are generated with.
        wire: the message format; None: it is set before the first twin.
    """

    def __init__(
        self, layout: Layout, world: World, chunks: int, has_twins: HasTwins, delay: int, wire: Wire | None
    ) -> None:
        self.wire = wire
        self.ahead = layout.ahead(delay)
        """Steps between generating a twin and learning from it."""
        self.note = torch.zeros(1, dtype=torch.uint8, device=world.device)
        """The largest note that came with the twins of this step."""
        self._layout, self._world, self._chunks, self._has_twins = layout, world, chunks, has_twins
        self._group = world.new_group()
        self._inbox: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}  # by batch and chunk
        self._sent: deque[tuple[int, dist.Work, Tensor]] = deque()

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
        lane = self._layout.lane_chunks(self._world.rank, self._chunks)
        for chunk in lane:
            if self._has_twins(batch, lane.start, chunk - lane.start) and self._owner(Role.ADV, chunk) == self._rank:
                buffer = torch.empty(self.format.size, dtype=torch.uint8, device=self._world.device)
                work = dist.irecv(buffer, self._owner(self._layout.maker(), chunk), group=self._group)
                assert work is not None
                self._inbox[batch, chunk] = work, buffer

    def take(self, batch: int, chunk: int) -> Tensor | None:
        """The twins of a chunk; None if they were not sent."""
        with span("hand-off"):
            work, message = self._inbox.pop((batch, chunk), (None, None))
            if work is None or message is None:
                return None
            work.wait()
            self.note = torch.maximum(self.note, message[-1:])
            return self.format.unpack(message)

    def send(self, batch: int, chunk: int, images: Tensor, note: int = 0) -> None:
        """Send the twins of a chunk to the rank that learns from them."""
        with span("hand-off"):
            while self._sent and self._sent[0][0] < batch:  # a rank that took a step since then has received it
                self._sent.popleft()[1].wait()
            message = self.format.pack(images, note)
            work = dist.isend(message, self._owner(Role.ADV, chunk), group=self._group)
            assert work is not None
            self._sent.append((batch, work, message))

    def drain(self) -> None:
        """Wait for every message in flight, and drop it; all ranks must have taken the same number of steps."""
        for work in (*(work for _, work, _ in self._sent), *(work for work, _ in self._inbox.values())):
            work.wait()
        self._sent.clear()
        self._inbox.clear()

    @property
    def _rank(self) -> int:
        return self._world.rank

    def _owner(self, duty: Role, chunk: int) -> int:
        return self._layout.owner(duty, chunk, self._chunks)


class Mail:
    """The twins of `ConAdv` on a rank that learns: sent by others, or else evaluated here.

    Args:
        method: the method of this rank.
        local: evaluates twins here, with stale weights.
        post: sends and receives.
        place: of this rank.
    """

    reads_ahead = 0
    per_rank = False

    def __init__(self, method: ConAdv, local: Local, post: Post, place: Place) -> None:
        self.local = local
        self._method, self._post, self._place = method, post, place
        self._end = 0  # the first batch that no rank attacks ahead
        self._updates: deque[int] = deque(maxlen=post.ahead + 1)  # updates of the weights before each of the last steps

    def open(self, end: int) -> None:
        """Begin an epoch, or a run: all batches before `end` come, of which others attack all but the first."""
        self._post.drain()
        self._end = end

    def begin(self, t: int, ahead: Any) -> None:
        self.local.begin(t, None)
        before = self._updates[-1] if self._updates else 0
        self._updates.append(before + (not self.local.same_update))
        if Role.ADV in self._place.role and t + self._post.ahead < self._end:
            self._post.expect(t + self._post.ahead)

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        number = self._place.first_chunk + k
        if Role.ADV not in self._place.role:  # another rank learns from it
            twin = self.local.take(t, k, chunk)
            self._post.send(t, number, twin.images)
            return twin
        images = self._post.take(t, number)
        # With an update left out since, as by a GradScaler, they are of other weights than one process takes.
        if images is None or self._updates[-1] - self._updates[0] != self._post.ahead:
            return self._post.format.received(self.local.take(t, k, chunk))
        return Batch(images, chunk.labels, extra=chunk.extra)

    def end(self) -> None:
        self.local.end()

    def reset(self) -> None:
        self.local.reset()

    def state(self) -> tuple[dict[str, Any], State]:
        return self.local.state()

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self._updates.clear()
        self.local.load(about, tensors)


class Passed(LeftTwins):
    """The twins of `Recycled` that the clean ranks of a lane send to those that learn from them.

    Args:
        model: the network.
        method: the method of this rank.
        post: sends and receives.
        place: of this rank.
    """

    def __init__(self, model: nn.Module, method: Recycled, post: Post, place: Place) -> None:
        super().__init__(model, method.twin)
        self._post, self._place = post, place
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
        if Role.ADV in self._place.role:
            self._post.expect(t)
            self._posted = t
            return
        for k, twin in zip(sorted(self._coming), self._arrived(), strict=True):
            self._post.send(t, self._place.first_chunk + k, twin.images)
        self._coming = {}

    def remember(self, t: int, k: int, chunk: Batch) -> None:
        self._known[t, k] = chunk

    def source(self, t: int) -> int:
        return t - 1 if self._posted == t - 1 else super().source(t)

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        images = self._post.take(t - 1, self._place.first_chunk + k)
        return super().take(t, k, chunk) if images is None else replace(self._known[t - 1, k], images=images)

    def items(self) -> list[Batch]:
        """The twins that wait for the next step, in order; waits for those that are still on their way."""
        self.exchange()
        known, self._known = self._known, {}
        for (t, k), batch in known.items():
            images = self._post.take(t, self._place.first_chunk + k)
            if images is not None:
                self.adopt([replace(batch, images=images)])
        self._posted = None
        return super().items()

    def reset(self) -> None:
        super().reset()
        self._known, self._unsent, self._posted = {}, None, None


class Weights:
    """Sends the weights of each step to ranks that only attack, without waiting, or receives them there.

    Such a rank may fall behind: by as many steps as pass until its twins are needed.

    Args:
        layout: which rank does what.
        world: the ranks, all of which must make one.
        model: the network.
        ahead: steps between generating a twin and learning from it.
    """

    def __init__(self, layout: Layout, world: World, model: nn.Module, ahead: int) -> None:
        followers = layout.followers()
        self._source = followers.get(world.rank)
        self._targets = [rank for rank, source in followers.items() if source == world.rank]
        self._model, self._ahead = model, ahead
        self._group = world.new_group() if followers else None
        self._sent: deque[list[tuple[dist.Work | None, Tensor]]] = deque()

    def send(self, note: int = 0) -> None:
        """Send the current weights; `note`: not 0 if the run stops and no step follows."""
        if not self._targets:
            return
        while len(self._sent) > self._ahead:  # their twins were learnt from
            self._wait_for_oldest()
        message = flat(self._tensors)
        message = torch.cat([message, _note(note, message.device)])
        self._sent.append([(dist.isend(message, target, group=self._group), message) for target in self._targets])

    def receive(self) -> int:
        """Wait for the weights of a step, and copy them into the model; returns the note."""
        assert self._source is not None
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        message = torch.empty(size + 1, dtype=torch.uint8, device=self._tensors[0].device)
        with span("hand-off"):
            work = dist.irecv(message, self._source, group=self._group)
            assert work is not None
            work.wait()
        unflatten(message[:-1], self._tensors)
        return int(message[-1])

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._sent:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work, _ in self._sent.popleft():
            assert work is not None
            work.wait()

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


def _note(note: int, device: torch.device) -> Tensor:
    return torch.full((1,), note, dtype=torch.uint8, device=device)
