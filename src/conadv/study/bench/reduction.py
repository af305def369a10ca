"""Other ways to sum gradients over ranks, to measure ours against."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from conadv.core.learner import Losses
from conadv.core.splitbn import pending_statistics
from conadv.parallel.collectives import World


class Reduction(Protocol):
    """What a step knows of the exchange."""

    def zero_grad(self) -> None:
        """Begin a step."""

    def finish(self, losses: Losses) -> object:
        """End it: gradients and pending statistics are those of all ranks."""


class SummedAfter:
    """Everything in one sum, after the backward pass."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._statistics = pending_statistics(model)
        parameters = list(model.parameters())
        sizes = [*map(Tensor.numel, parameters), *map(Tensor.numel, self._statistics), 2]
        self._all = torch.zeros(sum(sizes))
        *gradients, self._losses = self._all.split(sizes)
        self._shared = gradients[len(parameters) :]
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())

    def zero_grad(self) -> None:
        self._all.zero_()

    def finish(self, losses: Losses) -> object:
        torch._foreach_copy_(self._shared, self._statistics)
        self._losses.copy_(torch.stack([*losses]))
        self._world.all_reduce(self._all)
        torch._foreach_copy_(self._statistics, self._shared)
        return bool(self._all.sum().isfinite())


class Averaged:
    """DistributedDataParallel, which does its part in the backward pass and tells neither statistics nor losses."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def finish(self, losses: Losses) -> object:
        return bool(torch.stack([*losses]).isfinite().all())
