"""Gradients in flat buckets; the all_reduce of a bucket can start as soon as its last gradient has arrived."""

from __future__ import annotations

import math
from collections.abc import Callable
from weakref import WeakMethod

import torch
from torch import Tensor, nn

# Small enough that the first all_reduce starts early in the backward pass, large enough that few are needed.
_BUCKET_BYTES = 2**20
# On a GPU, an all_reduce takes tens of microseconds to start.
_CUDA_BUCKET_BYTES = 25 * 2**20


def bucket_bytes(device: torch.device) -> int:
    """Return the largest size of a bucket in bytes, for gradients on this device."""
    return _CUDA_BUCKET_BYTES if device.type == "cuda" else _BUCKET_BYTES


class OwnGradients:
    """The gradients of a single process, which has no buckets: they stay in the tensors that autograd creates."""

    ready = False

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.own_total = parameters[0].detach().new_zeros(())

    def restart(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Do nothing: arrivals are not counted."""

    def reclaim(self) -> None:
        """Do nothing: the caller may change the gradients."""

    def close(self) -> None:
        """Give parameters without a gradient one of zeros, as on several ranks."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        largest = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None], math.inf)
        self.own_total = torch.stack([norm.to(self.own_total) for norm in largest]).sum()

    def total(self) -> Tensor:
        """Return a number that is finite only if all gradients are."""
        return self.own_total

    def clear_unless(self, finite: Tensor) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(finite.logical_not(), 0)


class Bucket:
    """Parameters whose gradients are views of one flat tensor.

    `own_total` is the sum of this rank's gradients, before the all_reduce: finite only if all of them are.

    Args:
        parameters: with the same dtype.
        on_ready: called when the last gradient of a step has arrived.
    """

    def __init__(self, parameters: list[nn.Parameter], on_ready: Callable[[], None]) -> None:
        self.gradients = torch.zeros(sum(map(Tensor.numel, parameters)), dtype=parameters[0].dtype).to(parameters[0])
        self.own_total = self.gradients.sum()
        self._on_ready = on_ready
        self._arrivals = 0
        self._expected: int | None = None  # arrivals per step; unknown during the first step
        self._closed = False
        self._version = 0  # PyTorch's count of in-place changes after our last one, to detect those of the caller
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
        """Count the arrivals again in the next step, which has another number of backward passes."""
        self._expected = None

    def reclaim(self) -> None:
        """Use the gradients of the caller's backward pass; raise a ValueError if the caller changed them since."""
        if not self._closed and not self._arrivals:
            self.gradients.zero_()
        elif self.gradients._version != self._version:
            raise ValueError(
                "the gradients were changed before the sum over the ranks: clear them before the backward pass, and "
                "clip or unscale them after team.all_reduce()"
            )
        self._attach()

    def close(self) -> None:
        """End the step: a gradient that arrives from now on is an error."""
        if self._expected is None:
            self._expected = self._arrivals
        self._closed = True
        self.own_total = self.gradients.sum()

    def mark(self) -> None:
        """Record that the last change of the gradients was ours."""
        self._version = self.gradients._version

    def total(self) -> Tensor:
        """Return a number that is finite only if all gradients are."""
        return self.gradients.sum()

    def clear_unless(self, finite: Tensor) -> None:
        self.gradients.masked_fill_(finite.logical_not(), 0)

    def _attach(self) -> None:
        """Set `.grad` to the views again, since `optimizer.zero_grad` may have set it to None."""
        for parameter, view in self._views.items():
            parameter.grad = view

    def _arrive(self, parameter: nn.Parameter) -> None:
        if self._closed:
            raise RuntimeError(
                "a gradient arrived after the sum over the ranks had started: "
                "the model uses other parameters in this step than in the first one"
            )
        view = self._views[parameter]
        if parameter.grad is not view:  # the caller cleared it between the forward and the backward pass
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        self.mark()
        self._arrivals += 1
        if self.ready:
            self._on_ready()


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method, but does not keep its object alive.

    Hooks of parameters would otherwise keep the exchange and its process groups alive as long as the model.
    """
    reference = WeakMethod(method)

    def call(*arguments: Tensor) -> None:
        if (living := reference()) is not None:
            living(*arguments)

    return call


def grouped(parameters: list[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Group consecutive parameters of the same dtype, up to `size` bytes."""
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
