"""SAM: the gradient at weights that were moved uphill first (Foret et al. 2021), and its stale form.

delay 0    x_t ──► gradient at θ_t ──► ρ·g/‖g‖ ──► x_t ──► gradient at θ_t + ρ·g/‖g‖ ──► .grad
delay 1    the uphill direction is that of the step before, so that both gradients could be computed at once
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from conadv.wrappers import is_sharded, trainable, unwrap

from .attack import Loss, copied_buffers, unsplit_modules
from .batch import Batch
from .roles import Role
from .state import State
from .step import Common, Method, Pass, Step
from .twins import Left

# The uphill direction of one chunk: a tensor per trainable parameter, of length 1 together.
Direction = list[Tensor]


@final
class Sam(Method):
    """Sharpness-aware minimization: descend along the gradient at the worst weights nearby.

    The weights move uphill by `rho`, along the gradient of each chunk by itself (m-sharpness with m = chunk_size), so
    that results do not depend on how chunks are spread over ranks. The first pass updates the running statistics.
    With delay 1 (as in AsyncSAM), chunk i of a batch goes uphill along the gradient of chunk i of the batch before, at
    the weights of that step; the first step uses its own. A direction per chunk is then kept in memory.

    Args:
        model: the network.
        loss: from outputs and labels to the mean loss over the images.
        rho: how far the weights move, in the L2 norm over all trainable parameters.
        delay: age of the direction in steps, 0 or 1.
        common: what every method takes, see `conadv.Common`: chunk_size, seed, autocast, batch, input_name.
    """

    __slots__ = ("rho",)

    duties = Role.CLEAN

    def __init__(
        self, model: nn.Module, loss: Loss, *, rho: float = 0.05, delay: int = 0, **common: Unpack[Common]
    ) -> None:
        if delay not in (0, 1):
            raise ValueError(f"delay {delay}: sam takes 0, or 1 for its stale form")
        if is_sharded(model):
            raise ValueError("sam moves whole weights: use DistributedDataParallel instead of FSDP2")
        super().__init__(Step(model, loss, common), delay)
        self.rho = rho
        self.twins: Left[Direction] = Left(model, "directions", _packed, _unpacked)
        self._check()

    def passes(self, k: int, chunk: Batch) -> list[Pass]:
        """The gradient of L(θ_t + ρ·direction, x_t) for one chunk."""
        self.twins.check(self._step.count)
        images = self._step.clean(chunk, 1.0)
        own = self._uphill(images, self.step, k)
        direction = self.twins.next() or own
        if self.delay:
            self.twins.put(k, own)
        return [each._replace(tracking="off", adversarial=True, within=self._moved(direction)) for each in images]

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        raise ValueError(
            "sam moves the weights during its backward pass, so it has no loss to return: call method(batch)"
        )

    def _check(self) -> None:
        if not 0 < self.rho < math.inf:
            raise ValueError(f"rho {self.rho}: a length above 0, such as 0.05")

    def _settings(self) -> dict[str, Any]:
        return {"rho": self.rho}

    def direction(self, t: int, k: int, chunk: Batch) -> Direction:
        """The direction of chunk k of the batch of step t, with the weights that the model has now; leaves no trace."""
        images = [each._replace(tracking="off") for each in self._step.clean(chunk, 1.0)]
        return self._uphill(images, t, k)

    def _uphill(self, images: list[Pass], t: int, k: int) -> Direction:
        """The gradient of a chunk's loss at the current weights, scaled to length 1."""
        gradient = self._step.gradient(images, t, k, trainable(self._step.model))
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
        return list(torch._foreach_div(gradient, length.clamp_min(torch.finfo(length.dtype).tiny)))

    @contextmanager
    def _moved(self, direction: Direction) -> Iterator[None]:
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


def _packed(direction: Direction) -> State:
    return {str(number): own for number, own in enumerate(direction)}


def _unpacked(tensors: State) -> Direction:
    return [tensors[str(number)] for number in range(len(tensors))]
