"""One exchange per step: gradients, statistics and losses, summed over the ranks while the backward pass still runs.

backward ──► last gradient of a bucket ──► its sum starts ──► ... ──► finish: start the rest, wait for all

On every rank a step communicates in this order, so that NCCL never has two ranks that wait for each other:

1. the hand-off's messages of all chunks but the last one of each rank that makes twins (of all chunks, where twins are
   learnt from in the same step), by chunk
2. the gradient sums of the learning ranks, bucket by bucket
3. the hand-off's messages of those last chunks, by chunk
4. summed gradients, from learning ranks to the ranks of their lane that only attack
5. the sum over all ranks of statistics, losses, checksum and stop requests

With a delay of 2 or more, ranks that only attack have no part in 5: its result is sent to them like the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.parts import Losses
from conadv.core.splitbn import pending_statistics

from .checksum import BITS, Checksum, odd_ones
from .collectives import World
from .outcome import Outcome, Report, named_culprits
from .recipients import Recipients

# Small enough that the first sum starts early in the backward pass, large enough that few sums are needed.
_BUCKET_BYTES = 2**20
# On a GPU a sum takes tens of microseconds to start.
_CUDA_BUCKET_BYTES = 25 * 2**20
# How many numbers a rank adds besides gradients and statistics.
_TOLD = 3


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
        size = _CUDA_BUCKET_BYTES if world.device.type == "cuda" else _BUCKET_BYTES
        # Alone, nothing is summed, and a model may use other parameters in each step.
        self._buckets: Sequence[_Bucket | _Own] = (
            [_Bucket(group, _weakly(self._start_ready)) for group in _grouped(trained[::-1], size)]
            if world.size > 1
            else [_Own(trained)]
        )
        self._report = Report(world.size)
        self._sums: list[dist.Work | None] = []
        self._started = 0  # buckets start in their order, which is the same on every rank

    def zero_grad(self) -> None:
        """Begin a step."""
        for bucket in self._buckets:
            bucket.restart()
        self._started = 0

    def start(self) -> None:
        """Start the sums of all gradients: none is added any more in this step."""
        self._start(len(self._buckets))

    def finish(self, losses: Losses, stop: int = 0, asked: Tensor | None = None) -> Outcome:
        """End a step: gradients and pending statistics become their sums over the ranks.

        Args:
            losses: of this rank.
            stop: the number of the signal that asked this rank to stop after the step; 0: none did.
            asked: such a number that came with twins, from a rank that only attacks.
        """
        self.start()
        if self._recipients.may_lag:
            return self._follow()
        values = torch.stack([*losses]).to(self._like)
        sick = self._sick(values)
        bits = values[:0] if self._checksum is None else self._checksum.next().to(values)
        stops = torch.full_like(values[:1], stop > 0)
        if asked is not None:
            stops += asked > 0
        tail = torch.cat([stops, self._share * values, bits, *self._statistics])
        self._complete()
        self._recipients.all_reduce(tail)
        told = self._take_statistics(tail, len(bits))
        # One not-a-number or infinity anywhere makes the sum one too.
        total = torch.stack([tail.sum(), *(bucket.total().to(tail) for bucket in self._buckets)]).sum()
        everything, stopping, clean, adv, *ones = torch.cat([total[None], told]).tolist()
        culprits = None if math.isfinite(everything) else self._culprits(sick)
        # A bit that all ranks have in common is set on all of them or on none.
        drifted = self._drifted(bits) if any(0 < count < self._recipients.size for count in ones) else ()
        signal = self._largest(max(stop, 0 if asked is None else int(asked))) if stopping else 0
        outcome = Outcome(clean, adv, culprits, signal, drifted)
        if self._recipients.slack:
            self._recipients.start_passing(torch.cat([tail, self._report.pack(outcome, tail)]))
        return outcome

    def drain(self) -> None:
        """Wait until ranks that only attack have received what was sent to them."""
        self._recipients.drain()

    def discard(self) -> None:
        """Forget the statistics of a step that is not to be taken."""
        for part in self._statistics:
            part.zero_()

    def _follow(self) -> Outcome:
        """End a step that the learning ranks ended before: gradients, statistics and outcome are theirs."""
        assert self._checksum is not None
        bits = self._checksum.next().to(self._like)
        self._complete()
        sizes = [_TOLD + len(bits) + sum(map(len, self._statistics)), self._report.size]
        message = torch.empty(sum(sizes), dtype=self._like.dtype, device=self._like.device)
        for work in self._recipients.start_passing(message):
            self._world.wait(work)
        tail, report = message.split(sizes)
        told = self._take_statistics(tail, len(bits)).tolist()
        outcome = self._report.unpack(report, told[1], told[2])
        if outcome.drifted or told[_TOLD:] == (bits * self._recipients.size).tolist():
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
            self._sums.append(self._recipients.start_sum(bucket.gradients) if isinstance(bucket, _Bucket) else None)
        self._started = max(self._started, end)

    def _complete(self) -> None:
        """Wait for the sums; each is passed on as soon as it is there."""
        self._recipients.begin_passing()
        passed = []
        for bucket, work in zip(self._buckets, self._sums, strict=True):
            self._world.wait(work)
            if isinstance(bucket, _Bucket):
                passed += self._recipients.start_passing(bucket.gradients)
        for work in passed:
            self._world.wait(work)
        self._sums.clear()


class _Own:
    """The gradients of a process that is alone, in the tensors that autograd makes: nothing is copied or added."""

    ready = False

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.own_total = parameters[0].detach().new_zeros(())

    def restart(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """An optimizer treats a parameter that had no part in the loss like one whose gradient is zero."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.own_total = self.total()

    def total(self) -> Tensor:
        """Not finite where any gradient is not."""
        largest = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None], math.inf)
        return torch.stack([norm.to(self.own_total) for norm in largest]).sum()


class _Bucket:
    """Some parameters whose gradients are views of one flat tensor, and how many are still missing.

    `own_total` is the sum of this rank's gradients, which tells whether they are finite.
    """

    def __init__(self, parameters: list[nn.Parameter], tell: Callable[[], None]) -> None:
        self.gradients = torch.zeros(sum(map(Tensor.numel, parameters)), dtype=parameters[0].dtype).to(parameters[0])
        self.own_total = self.gradients.sum()
        self._tell = tell
        self._arrivals = 0
        self._expected: int | None = None  # arrivals in a step; unknown until the first one is over
        self._closed = False
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        offset = 0
        for parameter in parameters:
            self._views.append((parameter, self.gradients.as_strided(parameter.shape, parameter.stride(), offset)))
            parameter.register_post_accumulate_grad_hook(_weakly(self._arrive))
            offset += parameter.numel()
        self.restart()

    @property
    def ready(self) -> bool:
        return self._arrivals == self._expected

    def restart(self) -> None:
        self._arrivals, self._closed = 0, False
        self.gradients.zero_()
        for parameter, view in self._views:  # an optimizer may have put None in their place
            parameter.grad = view

    def close(self) -> None:
        """No gradient may be added any more."""
        if self._expected is None:
            self._expected = self._arrivals
        self._closed = True
        self.own_total = self.gradients.sum()

    def total(self) -> Tensor:
        """Not finite where any gradient is not."""
        return self.gradients.sum()

    def _arrive(self, parameter: Tensor) -> None:
        if self._closed:
            raise RuntimeError(
                "a gradient came after the sum over the ranks had started: "
                "the model uses other parameters in this step than in the first one"
            )
        self._arrivals += 1
        if self.ready:
            self._tell()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of the method for as long as its object exists.

    A hook of a parameter that held the exchange would keep it, and its process groups, for as long as the model exists.
    """
    reference = WeakMethod(method)

    def call(*arguments: Tensor) -> None:
        if (living := reference()) is not None:
            living(*arguments)

    return call


def _grouped(parameters: list[nn.Parameter], size: int = _BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one type, up to `size` bytes."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if not groups or own > room or parameter.dtype != groups[-1][0].dtype:
            groups.append([])
            room = size
        groups[-1].append(parameter)
        room -= own
    return groups
