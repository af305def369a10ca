"""SAM: the gradient at weights that were moved uphill first (Foret et al. 2021), and its stale form.

delay 0    x_t ──► gradient at θ_t ──► ρ·g/‖g‖ ──► x_t ──► gradient at θ_t + ρ·g/‖g‖ ──► .grad
delay 1    the uphill direction is that of the step before, so that both gradients could be computed at once
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from conadv.wrappers import is_sharded, unwrap

from .attack import Loss, copied_buffers, unsplit_modules, without_trace
from .batch import Batch
from .roles import Role
from .state import State
from .step import Common, Method, Pass

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

    __slots__ = ("_delay", "directions", "rho")

    duties = Role.CLEAN

    def __init__(
        self, model: nn.Module, loss: Loss, *, rho: float = 0.05, delay: int = 0, **common: Unpack[Common]
    ) -> None:
        if not 0 < rho < math.inf:
            raise ValueError(f"rho {rho}: a length above 0, such as 0.05")
        if delay not in (0, 1):
            raise ValueError(f"delay {delay}: sam takes 0, or 1 for its stale form")
        if is_sharded(model):
            raise ValueError("sam moves whole weights: use DistributedDataParallel instead of FSDP2")
        super().__init__(model, loss, common)
        self.rho = rho
        self._delay = delay
        self.directions = self.twins = Directions(model, delay)

    def passes(self, k: int, chunk: Batch) -> list[Pass]:
        """The gradient of L(θ_t + ρ·direction, x_t) for one chunk."""
        images = self._step.clean(chunk, 1.0)
        direction = self.directions.take(k, self._step.count, self._uphill(images, self.step, k))
        return [each._replace(counted=False, adversarial=True, within=self._moved(direction)) for each in images]

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        raise ValueError(
            "sam moves the weights during its backward pass, so it has no loss to return: call method(batch)"
        )

    @property
    def delay(self) -> int:
        return self._delay

    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"rho": self.rho}, {}

    def direction(self, t: int, k: int, chunk: Batch) -> Direction:
        """The direction of chunk k of the batch of step t, with the weights that the model has now; leaves no trace."""
        images = [each._replace(counted=False) for each in self._step.clean(chunk, 1.0)]
        with without_trace(unwrap(self._step.model), "main", None, None):
            return self._uphill(images, t, k)

    def _uphill(self, images: list[Pass], t: int, k: int) -> Direction:
        """The gradient of a chunk's loss at the current weights, scaled to length 1."""
        # With copies of the images, on which a model may work in place.
        copies = [each._replace(batch=replace(each.batch, images=each.batch.images.clone())) for each in images]
        gradient = self._step.weight_gradient(copies, t, k, trained(self._step.model))
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradient)))
        return list(torch._foreach_div(gradient, length.clamp_min(torch.finfo(length.dtype).tiny)))

    @contextmanager
    def _moved(self, direction: Direction) -> Iterator[None]:
        """Move the weights along a direction, within this context; a backward pass may recompute layers there."""
        weights = trained(self._step.model)
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


class Directions:
    """The uphill directions of the chunks of a step and, with delay 1, of the step before; the first step has none."""

    reads_ahead = 0
    per_rank = True

    def __init__(self, model: nn.Module, delay: int) -> None:
        self._model, self._delay = model, delay
        self._before: list[Direction] = []
        self._now: list[Direction] = []

    def adopt(self, directions: Iterable[Direction]) -> None:
        """Let these be the directions of the step before, chunk by chunk."""
        self._now.extend(directions)

    def begin(self, t: int, ahead: Any) -> None:
        shapes = [weight.shape for weight in trained(self._model)]
        if any([own.shape for own in direction] != shapes for direction in self._now):
            self._now = []  # other weights are trained now
        self._before, self._now = self._now, []

    def take(self, k: int, count: int, own: Direction) -> Direction:
        """The direction that chunk k of `count` takes; its own is kept for the next step."""
        if len(self._before) not in (0, count):
            raise ValueError(
                f"a batch of {count} chunks, after one of {len(self._before)}: sam with delay 1 needs batches of one "
                "size (drop_last=True drops the smaller last one)"
            )
        if self._delay:
            self._now.append(own)
        return self._before[k] if self._before else own

    def end(self) -> None:
        """Do nothing: the directions of this step stay for the next one."""

    def reset(self) -> None:
        self._before, self._now = [], []

    def state(self) -> tuple[dict[str, Any], State]:
        chunks = enumerate(self._now)
        return {}, {f"{k}.{number}": own for k, direction in chunks for number, own in enumerate(direction)}

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self.reset()
        device, size = next(self._model.parameters()).device, len(trained(self._model))
        for k in range(len(tensors) // size):
            self._now.append([tensors[f"{k}.{number}"].to(device) for number in range(size)])


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of a model without its wrappers."""
    return [weight for weight in unwrap(model).parameters() if weight.requires_grad]
