"""One exchange a step: gradients, statistics and losses, summed over the ranks while the backward pass still runs.

backward ──► last gradient of a bucket ──► its sum starts ──► ... ──► finish: start the rest, wait for all
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv.core.learner import Losses
from conadv.core.splitbn import pending_statistics

from .world import World

# Small enough that the first sum starts early in the backward pass, large enough that few sums are needed.
_BUCKET_BYTES = 2**20
# How many numbers a rank tells beside gradients and statistics.
_TOLD = 5


@dataclass(frozen=True)
class Outcome:
    """What all ranks know of a step, the same on each of them."""

    clean_loss: float
    adv_loss: float
    finite: bool
    """Whether losses and gradients are numbers."""
    rank: int | None
    """The rank whose loss is not finite; None: no rank's, or several."""
    stop: bool
    """Whether any rank was asked to stop."""


class Exchange:
    """The gradients of a model, in flat buckets, and what else ranks tell each other in a step.

    How many gradients a step brings to a bucket is learnt from the first one: a rank that only learns from twins, say,
    never reaches the weights of the main branch, and adds zeros there.
    """

    def __init__(self, model: nn.Module, world: World, share: float) -> None:
        self._world = world
        self._share = share
        self._statistics = pending_statistics(model)
        self._like = next(model.parameters())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = [_Bucket(group, self._start_ready) for group in _grouped(trained[::-1])]
        self._sums: list[dist.Work] = []
        self._started = 0  # buckets start in their order, which is the same on every rank

    def zero(self) -> None:
        """Begin a step."""
        for bucket in self._buckets:
            bucket.restart()
        self._started = 0
        self._start_ready()

    def finish(self, losses: Losses, stop: bool = False) -> Outcome:
        """End a step: gradients and pending statistics become their sums over the ranks."""
        self._start(len(self._buckets))
        tail = torch.cat([self._told(losses, stop), *self._statistics])
        self._begin_sum(tail)
        for work in self._sums:
            work.wait()
        self._sums.clear()
        told, statistics = tail[:_TOLD], tail[_TOLD:]
        torch._foreach_copy_(self._statistics, list(statistics.split([len(part) for part in self._statistics])))
        return self._outcome(*told.tolist())

    def discard(self) -> None:
        """Forget the statistics of a step that is not to be taken."""
        for part in self._statistics:
            part.zero_()

    def _told(self, losses: Losses, stop: bool) -> Tensor:
        """What a rank tells of its step, in numbers whose sum over the ranks says it all."""
        values = torch.stack([*losses]).to(self._like)
        bad = values.isfinite().all().logical_not().to(self._like)
        flags = torch.stack([torch.full_like(bad, float(stop)), bad, bad * self._world.rank])
        return torch.cat([flags, self._share * values])

    def _outcome(self, stops: float, bad: float, bad_ranks: float, clean: float, adv: float) -> Outcome:
        # One not-a-number or infinity anywhere makes the sum one too.
        gradients = sum(float(bucket.gradients.sum()) for bucket in self._buckets)
        finite = all(map(math.isfinite, (clean, adv, gradients)))
        return Outcome(clean, adv, finite, int(bad_ranks) if bad == 1 else None, stops > 0)

    def _start_ready(self) -> None:
        ready = self._started
        while ready < len(self._buckets) and self._buckets[ready].ready:
            ready += 1
        self._start(ready)

    def _start(self, end: int) -> None:
        """Start the sums of the buckets up to `end`."""
        for bucket in self._buckets[self._started : end]:
            bucket.close()
            self._begin_sum(bucket.gradients)
        self._started = max(self._started, end)

    def _begin_sum(self, tensor: Tensor) -> None:
        work = self._world.start_sum(tensor)
        if work is not None:
            self._sums.append(work)


class _Bucket:
    """Some parameters whose gradients lie in one flat tensor, and how many of them are still awaited."""

    def __init__(self, parameters: list[nn.Parameter], tell: Callable[[], None]) -> None:
        self.gradients = torch.zeros(sum(map(Tensor.numel, parameters)), dtype=parameters[0].dtype).to(parameters[0])
        self._tell = tell
        self._arrivals = 0
        self._expected: int | None = None  # arrivals in a step; unknown until the first one is over
        self._closed = False
        offset = 0
        for parameter in parameters:
            parameter.grad = self.gradients.as_strided(parameter.shape, parameter.stride(), offset)
            parameter.register_post_accumulate_grad_hook(self._arrive)
            offset += parameter.numel()

    @property
    def ready(self) -> bool:
        return self._arrivals == self._expected

    def restart(self) -> None:
        self._arrivals, self._closed = 0, False
        self.gradients.zero_()

    def close(self) -> None:
        """No gradient may be added any more."""
        if self._expected is None:
            self._expected = self._arrivals
        self._closed = True

    def _arrive(self, parameter: Tensor) -> None:
        if self._closed:
            raise RuntimeError(
                "a gradient came after the sum over the ranks had started: "
                "the model uses other parameters in this step than in the first one"
            )
        self._arrivals += 1
        if self.ready:
            self._tell()


def _grouped(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one type, up to a bucket's size."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if not groups or size > room or parameter.dtype != groups[-1][0].dtype:
            groups.append([])
            room = _BUCKET_BYTES
        groups[-1].append(parameter)
        room -= size
    return groups
