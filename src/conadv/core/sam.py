"""SAM: the gradient at weights that were moved uphill first (Foret et al. 2021).

x_t ──► gradient g at θ_t ──► x_t ──► gradient at θ_t + ρ·g/‖g‖ ──► .grad
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from conadv.roles import Role
from conadv.wrappers import is_sharded, trainable, unwrap

from .attack import Loss, copied_buffers, unsplit_modules
from .batch import Batch
from .step import Common, Method, Pass, Step


@final
class Sam(Method):
    """Sharpness-aware minimization: descend along the gradient at the worst weights nearby.

    The weights move uphill by `rho`, along the gradient of each chunk by itself (m-sharpness with m = chunk_size), so
    that results do not depend on how chunks are spread over ranks. The first pass updates the running statistics.

    Args:
        model: the network; with `chunk_size`, call `split_batchnorm(model, ("main",))` first.
        loss: from outputs and labels to the mean loss over the images.
        rho: how far the weights move, in the L2 norm over all trainable parameters.
        common: what every method takes, see `conadv.Common`.
    """

    __slots__ = ("rho",)

    duties = Role.CLEAN

    def __init__(self, model: nn.Module, loss: Loss, *, rho: float = 0.05, **common: Unpack[Common]) -> None:
        if is_sharded(model):
            raise ValueError("sam moves whole weights: use DistributedDataParallel instead of FSDP2")
        super().__init__(Step(model, loss, common), delay=0)
        self.rho = rho
        self._check()

    def passes(self, k: int, chunk: Batch) -> list[Pass]:
        """The gradient of L(θ_t + ρ·direction, x_t) for one chunk."""
        passes = self._step.clean(chunk, 1.0)
        direction = self._uphill(passes, k)
        return [each._replace(tracking="off", adversarial=True, within=self._moved(direction)) for each in passes]

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        raise ValueError(
            "sam moves the weights during its backward pass, so it has no loss to return: call method(batch)"
        )

    def _check(self) -> None:
        if not 0 < self.rho < math.inf:
            raise ValueError(f"rho {self.rho}: a length above 0, such as 0.05")

    def _changeable(self) -> dict[str, Any]:
        return {"rho": self.rho}

    def _uphill(self, passes: list[Pass], k: int) -> list[Tensor]:
        """The gradient of a chunk's loss at the current weights, scaled to length 1: a tensor per trainable weight."""
        gradient = self._step.gradient(passes, self.step, k, trainable(self._step.model))
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
        return list(torch._foreach_div(gradient, length.clamp_min(torch.finfo(length.dtype).tiny)))

    @contextmanager
    def _moved(self, direction: list[Tensor]) -> Iterator[None]:
        """Move the weights along a direction, within this context; a backward pass may recompute layers there."""
        weights = trainable(self._step.model)
        kept = [weight.data for weight in weights]
        try:
            for weight, moved in zip(weights, torch._foreach_add(kept, direction, alpha=self.rho), strict=True):
                weight.data = moved
            torch.clear_autocast_cache()  # it holds the weights as they were, in 16 bits
            with copied_buffers(unsplit_modules(unwrap(self._step.model))):
                yield
        finally:
            torch.clear_autocast_cache()
            for weight, own in zip(weights, kept, strict=True):
                weight.data = own
