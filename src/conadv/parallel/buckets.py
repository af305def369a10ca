"""Gradients in flat buckets, each summed over the ranks as soon as its last gradient is there."""

from __future__ import annotations

import math
from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch import Tensor, nn

# Small enough that the first sum starts early in the backward pass, large enough that few sums are needed.
_BUCKET_BYTES = 2**20
# On a GPU a sum takes tens of microseconds to start.
_CUDA_BUCKET_BYTES = 25 * 2**20


def bucket_bytes(device: torch.device) -> int:
    """The largest size of a bucket, for gradients on this device."""
    return _CUDA_BUCKET_BYTES if device.type == "cuda" else _BUCKET_BYTES


class OwnGradients:
    """The gradients of a process that is alone, in the tensors that autograd makes: nothing is copied or added."""

    ready = False

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.own_total = parameters[0].detach().new_zeros(())

    def restart(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Nothing is counted."""

    def reclaim(self) -> None:
        """Whatever a caller did to the gradients, nothing is added to them."""

    def close(self) -> None:
        """An optimizer treats a parameter that had no part in the loss like one whose gradient is zero."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        largest = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None], math.inf)
        self.own_total = torch.stack([norm.to(self.own_total) for norm in largest]).sum()

    def total(self) -> Tensor:
        """Not finite where any gradient is not."""
        return self.own_total  # nothing was added by others

    def clear_unless(self, finite: Tensor) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(finite.logical_not(), 0)


class Bucket:
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
        self._version = 0  # PyTorch's counter of changes, at the last one that was ours
        self._views: dict[nn.Parameter, Tensor] = {}
        offset = 0
        for parameter in parameters:
            self._views[parameter] = self.gradients.as_strided(parameter.shape, parameter.stride(), offset)
            parameter.register_post_accumulate_grad_hook(weakly(self._arrive))
            offset += parameter.numel()
        self.restart()

    @property
    def ready(self) -> bool:
        return self._arrivals == self._expected

    def restart(self) -> None:
        self._arrivals, self._closed = 0, False
        self.gradients.zero_()
        self._attach()

    def forget(self) -> None:
        """Count the gradients of a step again: the next one has another number of backward passes."""
        self._expected = None

    def reclaim(self) -> None:
        """Make the gradients of the caller's backward pass ours again, or refuse those that the caller changed."""
        if not self._closed and not self._arrivals:
            self.gradients.zero_()
        elif self.gradients._version != self._version:
            raise ValueError(
                "the gradients were changed before the sum over the ranks: clear them before the backward pass, and "
                "clip or unscale them after team.all_reduce()"
            )
        self._attach()

    def close(self) -> None:
        """No gradient may be added any more."""
        if self._expected is None:
            self._expected = self._arrivals
        self._closed = True
        self.own_total = self.gradients.sum()

    def mark(self) -> None:
        """Take the gradients as they are for ours."""
        self._version = self.gradients._version

    def total(self) -> Tensor:
        """Not finite where any gradient is not."""
        return self.gradients.sum()

    def clear_unless(self, finite: Tensor) -> None:
        self.gradients.masked_fill_(finite.logical_not(), 0)

    def _attach(self) -> None:
        """An optimizer may have put None in the place of a gradient."""
        for parameter, view in self._views.items():
            parameter.grad = view

    def _arrive(self, parameter: nn.Parameter) -> None:
        if self._closed:
            raise RuntimeError(
                "a gradient came after the sum over the ranks had started: "
                "the model uses other parameters in this step than in the first one"
            )
        view = self._views[parameter]
        if parameter.grad is not view:  # it was cleared between the forward and the backward pass
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        self.mark()
        self._arrivals += 1
        if self.ready:
            self._tell()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A call of the method for as long as its object exists.

    A hook of a parameter that held the exchange would keep it, and its process groups, for as long as the model exists.
    """
    reference = WeakMethod(method)

    def call(*arguments: Tensor) -> None:
        if (living := reference()) is not None:
            living(*arguments)

    return call


def grouped(parameters: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
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
