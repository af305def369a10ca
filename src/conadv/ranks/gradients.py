"""The communication of a step: gradients are summed over the ranks while the backward pass is still running.

backward ──► last gradient of a bucket ──► its all_reduce starts ──► ... ──► end: start the rest, wait for all

Every rank communicates in this order in each step, so that two ranks never wait for each other with NCCL:

1. twins of all chunks except the last one of each rank that generates twins (of all chunks, if twins are learnt from in
   the step in which they are generated), by chunk
2. all_reduce of the gradients over the learning ranks, by bucket
3. twins of those last chunks, by chunk
4. summed gradients, sent by learning ranks to the ranks of their lane that only attack
5. all_reduce of BatchNorm statistics, losses, checksum and requests to stop or save, over all ranks

With a delay of 2 or more, ranks that only attack may lag. They take no part in 5; its result is sent to them like the
gradients. If a number is not finite, weights differ or a rank asks to stop, a `Report` about it is sent to them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.splitbn import pending_statistics
from conadv.core.step import Losses

from .buckets import Bucket, OwnGradients, bucket_bytes, grouped, weakly
from .checksum import Checksum, odd_ones
from .collectives import World
from .handoff import SAVE
from .outcome import Outcome, Report, Unread, named_culprits
from .reading import Reading
from .recipients import Recipients

# The last all_reduce begins with these numbers: requests to stop, requests to save, and two losses.
_HEAD = 4
_LOSSES = slice(2, 4)


class Exchange:
    """Sums gradients, BatchNorm statistics and losses over the ranks in each step.

    The first step counts the gradients that arrive in each bucket. A rank that only learns from twins, for example, has
    no gradients for the main branch, and adds zeros there.

    Args:
        model: the network.
        world: the ranks.
        share: the part of the global batch that this rank sees, which weights its losses.
        recipients: which ranks sum gradients, and which only receive the sum; None: all ranks sum theirs.
    """

    def __init__(self, model: nn.Module, world: World, share: float, recipients: Recipients | None = None) -> None:
        self._world = world
        self._recipients = recipients or Recipients(world)
        self._share = share
        self._statistics = pending_statistics(model)
        self._like = next(model.parameters())
        self._checksum = Checksum(list(model.parameters())) if world.size > 1 else None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # On a single process nothing is summed, and a model may use other parameters in each step.
        self._buckets: Sequence[Bucket | OwnGradients] = (
            [Bucket(group, weakly(self._start_ready)) for group in grouped(trained[::-1], bucket_bytes(world.device))]
            if world.size > 1
            else [OwnGradients(trained)]
        )
        self._report = Report(world.size)
        self._sums: list[dist.Work | None] = []
        self._started = 0  # buckets start in the same order on every rank
        self._one_pass = False

    @property
    def may_lag(self) -> bool:
        """Whether this rank only attacks, and others do not wait for it."""
        return self._recipients.may_lag

    def zero_grad(self, one_pass: bool = False) -> None:
        """Begin a step with gradients of zero.

        Args:
            one_pass: whether there will be one backward pass for the whole step, instead of one per chunk.
        """
        for bucket in self._buckets:
            bucket.restart()
            if one_pass != self._one_pass:
                bucket.forget()
        self._started, self._one_pass = 0, one_pass

    def reclaim(self) -> None:
        """Raise a ValueError if the caller changed gradients after the backward pass: some sums have started."""
        for bucket in self._buckets:
            bucket.reclaim()

    def start(self) -> None:
        """Start the sums of all gradients; no more may arrive in this step."""
        self._start(len(self._buckets))

    def finish(self, losses: Losses, stop: int = 0) -> Outcome:
        """End a step, and wait for its outcome; see `end`."""
        return self.end(losses, stop).read()

    def end(self, losses: Losses, stop: int = 0, note: Tensor | None = None, save: bool = False) -> Unread:
        """End a step: replace gradients and pending statistics by their sums over the ranks.

        On a GPU the host does not wait, unless a rank that only attacks has fallen too far behind.

        Args:
            losses: the losses of this rank.
            stop: the number of the signal that asked this rank to stop after the step; 0: none.
            note: the note of a rank that may lag, which came with its twins: its `stop`, plus `SAVE` for its `save`.
            save: whether this rank requests a checkpoint.
        """
        self.start()
        if self._recipients.may_lag:
            return self._end_lagging()
        values = torch.stack([*losses]).to(self._like)
        nonfinite = self._nonfinite(values)
        bits = values[:0] if self._checksum is None else self._checksum.next().to(values)
        stops = torch.full_like(values[:1], stop > 0)
        saves = torch.full_like(values[:1], save)
        if note is not None:
            stops += note % SAVE > 0
            saves += note >= SAVE
        tail = torch.cat([stops, saves, self._share * values, bits, *self._statistics])
        self._complete()
        self._world.order(self._recipients.start_all_reduce(tail))
        head = self._take_statistics(tail, len(bits))
        # A single NaN or infinity anywhere makes the sum NaN or infinite, too.
        finite = torch.stack([tail.sum(), *(bucket.total().to(tail) for bucket in self._buckets)]).sum().isfinite()
        reading = Reading(torch.cat([finite[None].to(head), head]))
        if self._recipients.slack:  # ranks that may lag receive it
            self._recipients.start_passing(torch.cat([tail, finite.logical_not()[None].to(tail)]))
        return Unread(finite, head[_LOSSES], partial(self._read, reading, nonfinite, bits, stop, note))

    def drain(self) -> None:
        """Wait until ranks that only attack have received everything that was sent to them."""
        self._recipients.drain()

    def has_finite_statistics(self) -> bool:
        """Whether the pending statistics (after `end` those of all ranks) are finite; waits for the device."""
        return all(bool(part.isfinite().all()) for part in self._statistics)

    def clear_unless(self, finite: Tensor) -> None:
        """Set gradients and pending statistics to zero, unless `finite` (a bool scalar on the device) is true."""
        for bucket in self._buckets:
            bucket.clear_unless(finite)
        for part in self._statistics:
            part.masked_fill_(finite.logical_not(), 0)

    def discard(self) -> None:
        """Set the pending statistics of a step that is skipped to zero."""
        for part in self._statistics:
            part.zero_()

    def _read(self, reading: Reading, nonfinite: Tensor, bits: Tensor, stop: int, note: Tensor | None) -> Outcome:
        """Read the outcome of a step; if something is wrong, the ranks find out on which of them."""
        finite, stopping, saves, clean, adv, *ones = self._world.read(reading)
        culprits = None if finite else named_culprits(self._gather(nonfinite) > 0)
        differ = self._differ(ones)
        drifted = self._drifted(bits) if differ else ()
        signal = 0
        if stopping:
            own = max(stop, 0 if note is None else int(note) % SAVE)
            signal = int(self._gather(torch.tensor([own], device=bits.device)).max())
        outcome = Outcome(clean, adv, culprits, signal, drifted, save=saves > 0)
        if self._recipients.slack and (not finite or stopping or differ):
            self._recipients.start_passing(self._report.pack(outcome, self._like))
        return outcome

    def _differ(self, ones: list[float]) -> bool:
        """Whether checksums differ: some bit is set on some ranks, but not on all of them."""
        size = len(self._recipients.members)
        return any(0 < count < size for count in ones)

    def _end_lagging(self) -> Unread:
        """End a step on a rank that may lag: receive gradients, statistics and outcome of the learning ranks."""
        assert self._checksum is not None
        bits = self._checksum.next().to(self._like)
        self._complete()
        message = self._receive(_HEAD + len(bits) + sum(map(len, self._statistics)) + 1)
        head, finite = self._take_statistics(message[:-1], len(bits)), message[-1] == 0
        reading = Reading(torch.cat([finite[None].to(head), head, bits]))
        return Unread(finite, head[_LOSSES], partial(self._read_lagging, reading, len(bits)))

    def _receive(self, size: int) -> Tensor:
        """Receive a message of the rank that sends summed gradients to this one."""
        message = torch.empty(size, dtype=self._like.dtype, device=self._like.device)
        for work in self._recipients.start_passing(message):
            self._world.order(work)
        return message

    def _read_lagging(self, reading: Reading, bits: int) -> Outcome:
        """Read the outcome of the learning ranks, and compare their checksum with that of this rank."""
        finite, stopping, saves, clean, adv, *rest = self._world.read(reading)
        ones, own = rest[:bits], rest[bits:]
        outcome = Outcome(clean, adv, None, 0, save=saves > 0)
        if not finite or stopping or self._differ(ones):
            outcome = self._report.unpack(self._receive(self._report.size), clean, adv, saves > 0)
        size = len(self._recipients.members)
        if outcome.drifted or ones == [size * bit for bit in own]:
            return outcome
        return replace(outcome, drifted=(self._world.rank,), known_to_all=False)

    def _take_statistics(self, tail: Tensor, bits: int) -> Tensor:
        """Copy the summed statistics to the pending ones; return the other numbers of the sum."""
        head, statistics = tail[: _HEAD + bits], tail[_HEAD + bits :]
        if self._statistics:
            torch._foreach_copy_(self._statistics, list(statistics.split([len(part) for part in self._statistics])))
        return head

    def _nonfinite(self, values: Tensor) -> Tensor:
        """Return whether losses, gradients and statistics of this rank have a number that is not finite."""
        gradients = torch.stack([bucket.own_total.to(values) for bucket in self._buckets])
        statistics = torch.cat([*self._statistics, values[:0]])
        return torch.stack([part.isfinite().all().logical_not() for part in (values, gradients, statistics)])

    def _drifted(self, bits: Tensor) -> tuple[int, ...]:
        """Return the ranks whose checksum differs from that of most ranks."""
        members = self._recipients.members
        rows = self._gather(bits)[members].tolist()
        return tuple(members[place] for place in odd_ones(rows))

    def _gather(self, row: Tensor) -> Tensor:
        """Return a table with the row of each rank, by an all_reduce; ranks that may lag have zeros."""
        table = torch.zeros(self._world.size, len(row), device=row.device)
        table[self._world.rank] = row
        return self._recipients.all_reduce(table)

    def _start_ready(self) -> None:
        ready = self._started
        while ready < len(self._buckets) and self._buckets[ready].ready:
            ready += 1
        self._start(ready)

    def _start(self, end: int) -> None:
        """Start the sums of the buckets up to `end`."""
        for bucket in self._buckets[self._started : end]:
            bucket.close()
            work = None
            if isinstance(bucket, Bucket):
                work = self._recipients.start_sum(bucket.gradients)
                bucket.mark()
            self._sums.append(work)
        self._started = max(self._started, end)

    def _complete(self) -> None:
        """Wait for the gradient sums, and send each one to ranks that only attack, or receive it there."""
        self._recipients.begin_passing()
        passed = []
        for bucket, work in zip(self._buckets, self._sums, strict=True):
            self._world.order(work)
            if isinstance(bucket, Bucket):
                passed += self._recipients.start_passing(bucket.gradients)
        for work in passed:
            self._world.order(work)
        self._sums.clear()
