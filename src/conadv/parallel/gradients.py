"""One exchange per step: gradients, statistics and losses, summed over the ranks while the backward pass still runs.

backward ──► last gradient of a bucket ──► its sum starts ──► ... ──► end: start the rest, wait for all

On every rank a step communicates in this order, so that NCCL never has two ranks that wait for each other:

1. the hand-off's messages of all chunks but the last one of each rank that makes twins (of all chunks, where twins are
   learnt from in the same step), by chunk
2. the gradient sums of the learning ranks, bucket by bucket
3. the hand-off's messages of those last chunks, by chunk
4. summed gradients, from learning ranks to the ranks of their lane that only attack
5. the sum over all ranks of statistics, losses, checksum and stop requests

With a delay of 2 or more, ranks that only attack have no part in 5: its result is sent to them like the gradients. When
the step is read, where something is wrong or asks to stop, they are sent the words for it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.parts import Losses
from conadv.core.splitbn import pending_statistics

from .buckets import Bucket, OwnGradients, bucket_bytes, grouped, weakly
from .checksum import BITS, Checksum, odd_ones
from .collectives import World
from .handoff import SAVE
from .outcome import Outcome, Report, Unread, named_culprits
from .reading import Reading
from .recipients import Recipients

# How many numbers a rank adds besides gradients and statistics: requests to stop and to save, and two losses.
_TOLD = 4
_LOSSES = slice(2, 4)


class Exchange:
    """The gradients of a model, in flat buckets, and what else ranks tell each other in a step.

    How many gradients a step brings to a bucket is learnt from the first one: a rank that only learns from twins, say,
    never reaches the weights of the main branch, and adds zeros there.
    """

    def __init__(self, model: nn.Module, world: World, share: float, recipients: Recipients | None = None) -> None:
        self._world = world
        self._recipients = recipients or Recipients(world)
        self._share = share
        self._statistics = pending_statistics(model)
        self._like = next(model.parameters())
        self._checksum = Checksum(list(model.parameters())) if world.size > 1 else None
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Alone, nothing is summed, and a model may use other parameters in each step.
        self._buckets: Sequence[Bucket | OwnGradients] = (
            [Bucket(group, weakly(self._start_ready)) for group in grouped(trained[::-1], bucket_bytes(world.device))]
            if world.size > 1
            else [OwnGradients(trained)]
        )
        self._report = Report(world.size)
        self._sums: list[dist.Work | None] = []
        self._started = 0  # buckets start in their order, which is the same on every rank
        self._one_pass = False

    @property
    def may_lag(self) -> bool:
        """Whether this rank only attacks, and others do not wait for it."""
        return self._recipients.may_lag

    def zero_grad(self, one_pass: bool = False) -> None:
        """Begin a step.

        Args:
            one_pass: the caller takes the gradients of the whole step in one backward pass.
        """
        for bucket in self._buckets:
            bucket.restart()
            if one_pass != self._one_pass:
                bucket.forget()
        self._started, self._one_pass = 0, one_pass

    def reclaim(self) -> None:
        """Refuse gradients that the caller changed after the backward pass: some sums have started."""
        for bucket in self._buckets:
            bucket.reclaim()

    def start(self) -> None:
        """Start the sums of all gradients: none is added any more in this step."""
        self._start(len(self._buckets))

    def finish(self, losses: Losses, stop: int = 0) -> Outcome:
        """End a step, and wait for its outcome; see `end`."""
        return self.end(losses, stop).read()

    def end(self, losses: Losses, stop: int = 0, asked: Tensor | None = None, save: bool = False) -> Unread:
        """End a step: gradients and pending statistics become their sums over the ranks.

        With GPUs the host waits for nothing here, unless a rank that only attacks has fallen behind too far.

        Args:
            losses: of this rank.
            stop: the number of the signal that asked this rank to stop after the step; 0: none did.
            asked: what came with twins, from a rank that only attacks: such a number, plus `SAVE` for a checkpoint.
            save: whether this rank asks for a checkpoint.
        """
        self.start()
        if self._recipients.may_lag:
            return self._follow()
        values = torch.stack([*losses]).to(self._like)
        sick = self._sick(values)
        bits = values[:0] if self._checksum is None else self._checksum.next().to(values)
        stops = torch.full_like(values[:1], stop > 0)
        saves = torch.full_like(values[:1], save)
        if asked is not None:
            stops += asked % SAVE > 0
            saves += asked >= SAVE
        tail = torch.cat([stops, saves, self._share * values, bits, *self._statistics])
        self._complete()
        self._world.order(self._recipients.start_all_reduce(tail))
        told = self._take_statistics(tail, len(bits))
        # One not-a-number or infinity anywhere makes the sum one too.
        finite = torch.stack([tail.sum(), *(bucket.total().to(tail) for bucket in self._buckets)]).sum().isfinite()
        reading = Reading(torch.cat([finite[None].to(told), told]))
        if self._recipients.slack:  # ranks that may lag receive it
            self._recipients.start_passing(torch.cat([tail, finite.logical_not()[None].to(tail)]))
        return Unread(finite, told[_LOSSES], partial(self._read, reading, sick, bits, stop, asked))

    def drain(self) -> None:
        """Wait until ranks that only attack have received what was sent to them."""
        self._recipients.drain()

    def has_finite_statistics(self) -> bool:
        """Whether the pending statistics, those of all ranks after a step, are finite; waits for the device."""
        return all(bool(part.isfinite().all()) for part in self._statistics)

    def clear_unless(self, finite: Tensor) -> None:
        """Make gradients and statistics zero, unless `finite` (bool, without dimensions) is true on the device."""
        for bucket in self._buckets:
            bucket.clear_unless(finite)
        for part in self._statistics:
            part.masked_fill_(finite.logical_not(), 0)

    def discard(self) -> None:
        """Forget the statistics of a step that is not to be taken."""
        for part in self._statistics:
            part.zero_()

    def _read(self, reading: Reading, sick: Tensor, bits: Tensor, stop: int, asked: Tensor | None) -> Outcome:
        """What the ranks told each other, and where something is wrong, on which of them; every rank asks at once."""
        finite, stopping, saves, clean, adv, *ones = self._world.read(reading)
        culprits = None if finite else self._culprits(sick)
        drifted = self._drifted(bits) if self._differ(ones) else ()
        signal = self._largest(max(stop, 0 if asked is None else int(asked) % SAVE)) if stopping else 0
        outcome = Outcome(clean, adv, culprits, signal, drifted, save=saves > 0)
        if self._recipients.slack and (not finite or stopping or self._differ(ones)):
            self._recipients.start_passing(self._report.pack(outcome, self._like))
        return outcome

    def _differ(self, ones: list[float]) -> bool:
        """Whether ranks have other weights: a bit that all have in common is set on all of them or on none."""
        return any(0 < count < self._recipients.size for count in ones)

    def _follow(self) -> Unread:
        """End a step that the learning ranks ended before: gradients, statistics and outcome are theirs."""
        assert self._checksum is not None
        bits = self._checksum.next().to(self._like)
        self._complete()
        message = self._receive(_TOLD + len(bits) + sum(map(len, self._statistics)) + 1)
        told, finite = self._take_statistics(message[:-1], len(bits)), message[-1] == 0
        reading = Reading(torch.cat([finite[None].to(told), told, bits]))
        return Unread(finite, told[_LOSSES], partial(self._hear, reading, len(bits)))

    def _receive(self, size: int) -> Tensor:
        """A message of the rank that sends summed gradients to this one."""
        message = torch.empty(size, dtype=self._like.dtype, device=self._like.device)
        for work in self._recipients.start_passing(message):
            self._world.order(work)
        return message

    def _hear(self, reading: Reading, bits: int) -> Outcome:
        """What the learning ranks know of a step, and whether this rank has their weights."""
        finite, stopping, saves, clean, adv, *rest = self._world.read(reading)
        ones, own = rest[:bits], rest[bits:]
        outcome = Outcome(clean, adv, None, 0, save=saves > 0)
        if not finite or stopping or self._differ(ones):
            outcome = self._report.unpack(self._receive(self._report.size), clean, adv, saves > 0)
        if outcome.drifted or ones == [self._recipients.size * bit for bit in own]:
            return outcome
        return replace(outcome, drifted=(self._world.rank,), known_to_all=False)

    def _take_statistics(self, tail: Tensor, bits: int) -> Tensor:
        """Give the pending statistics their sums; the rest of what was summed."""
        told, statistics = tail[: _TOLD + bits], tail[_TOLD + bits :]
        if self._statistics:
            torch._foreach_copy_(self._statistics, list(statistics.split([len(part) for part in self._statistics])))
        return told

    def _largest(self, number: int) -> int:
        """The largest of the numbers of the ranks, each below 256."""
        table = torch.zeros(self._world.size, device=self._like.device)
        table[self._world.rank] = number
        return int(self._recipients.all_reduce(table).max())

    def _sick(self, values: Tensor) -> Tensor:
        """Which of this rank's own numbers are not finite, before the sum over the ranks hides it."""
        gradients = torch.stack([bucket.own_total.to(values) for bucket in self._buckets])
        statistics = torch.cat([*self._statistics, values[:0]])
        return torch.stack([part.isfinite().all().logical_not() for part in (values, gradients, statistics)])

    def _culprits(self, sick: Tensor) -> dict[int, str]:
        """The ranks whose numbers are not finite, and which; every rank asks at once."""
        table = torch.zeros(self._world.size, len(sick), device=sick.device)
        table[self._world.rank] = sick.float()
        return named_culprits(self._recipients.all_reduce(table) > 0)

    def _drifted(self, bits: Tensor) -> tuple[int, ...]:
        """The ranks whose weights have another checksum than most; every rank asks at once."""
        table = torch.zeros(self._world.size, BITS, device=bits.device)
        table[self._world.rank] = bits
        members = self._recipients.members
        rows = self._recipients.all_reduce(table)[members].tolist()
        return tuple(members[place] for place in odd_ones(rows))

    def _start_ready(self) -> None:
        ready = self._started
        while ready < len(self._buckets) and self._buckets[ready].ready:
            ready += 1
        self._start(ready)

    def _start(self, end: int) -> None:
        """Start the sums of the buckets up to `end`."""
        for bucket in self._buckets[self._started : end]:
            bucket.close()
            if not isinstance(bucket, Bucket):
                self._sums.append(None)
                continue
            self._sums.append(self._recipients.start_sum(bucket.gradients))
            bucket.mark()
        self._started = max(self._started, end)

    def _complete(self) -> None:
        """Let what follows come after the sums; each is passed on as soon as it is there."""
        self._recipients.begin_passing()
        passed = []
        for bucket, work in zip(self._buckets, self._sums, strict=True):
            self._world.order(work)
            if isinstance(bucket, Bucket):
                passed += self._recipients.start_passing(bucket.gradients)
        for work in passed:
            self._world.order(work)
        self._sums.clear()
