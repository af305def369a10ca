"""SAM: the gradient at weights that were moved uphill first (Foret et al. 2021), and its stale form.

delay 0    x_t ──► gradient at θ_t ──► ρ·g/‖g‖ ──► x_t ──► gradient at θ_t + ρ·g/‖g‖ ──► .grad
delay 1    the uphill direction is that of the step before, so that both gradients could be computed at once
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from .attack import Call, Loss, copied_buffers, unsplit_modules, without_trace
from .batch import Batch, Chunked, count_chunks
from .checks.peers import described
from .feed import Feed
from .learner import Learner
from .methods import Work
from .parts import Common, Losses, Part
from .roles import Role
from .state import State, below, pack, unpack
from .wrappers import unwrap

# The uphill direction of one chunk: a tensor per trainable parameter, of length 1 together.
Direction = list[Tensor]


class Sam:
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
        common: what every method takes, see `conadv.Common`: chunk_size, seed, autocast, batch, input_name, together,
            place.
    """

    __slots__ = ("_delay", "_learner", "_waiting", "rho")  # setting any other attribute is an error

    duties = Role.CLEAN

    def __init__(
        self, model: nn.Module, loss: Loss, *, rho: float = 0.05, delay: int = 0, **common: Unpack[Common]
    ) -> None:
        if not 0 < rho < math.inf:
            raise ValueError(f"rho {rho}: a length above 0, such as 0.05")
        if delay not in (0, 1):
            raise ValueError(f"delay {delay}: sam takes 0, or 1 for its stale form")
        self.rho = rho
        self._delay = delay
        self._waiting: deque[Direction] = deque()  # directions of the step before, by chunk
        self._learner = Learner(model, loss, common)

    @property
    def delay(self) -> int:
        return self._delay

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, loader: Iterable[Any]) -> Feed:
        """A loader of the pairs that the method is called with; see `Feed`."""
        return self._learner.feed(loader)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        for parts, number, count in self._work(now):
            with self._moved(self._waiting[0]), copied_buffers(unsplit_modules(unwrap(self._learner.model))):
                self._learner.learn(parts, number, count)
        return self._learner.end_step()

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        raise ValueError(
            "sam moves the weights during its backward pass, so it has no loss to return: call method(batch)"
        )

    @property
    def losses(self) -> Losses:
        """The mean losses of the last step."""
        return self._learner.losses

    def hand_over(self) -> None:
        """Do nothing: a call queues its directions itself."""

    def in_flight(self, step: int) -> range:
        return range(step - self.delay, step)

    def prime(self, batch: Any, number: int) -> None:
        own = self._learner.batch(batch)
        count = count_chunks(own, self._learner.chunk_size)
        directions = []
        with without_trace(unwrap(self._learner.model), "main", None, None):
            for chunk_number, chunk in enumerate(self._learner.chunks(own)):
                parts = [part._replace(tracked=False) for part in self._learner.clean_parts(chunk, 1.0)]
                directions.append(self._uphill(parts, number, chunk_number, count))
        self._waiting.extend(directions)  # of all chunks, or of none

    def resume(self, step: int) -> None:
        self._waiting.clear()
        self._learner.step = step

    def state_dict(self, all_ranks: bool = False) -> State:
        """The state besides the weights that the next step needs, as tensors for torch.save or safetensors.

        Args:
            all_ranks: with delay 1 on several ranks, gather the directions of all; every rank calls it.
        """
        directions = {
            f"{chunk}.{number}": tensor
            for chunk, direction in enumerate(self._waiting)
            for number, tensor in enumerate(direction)
        }
        return pack({**self._identity(), "step": self.step}, directions, own=self.delay > 0, all_ranks=all_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        about, tensors = unpack(state, self._identity(), own=self.delay > 0)
        self._learner.step = about["step"]
        size = len(self._parameters())
        chunks = [below(f"{chunk}.", tensors) for chunk in range(len(tensors) // size)]
        device = self._learner.device
        self._waiting = deque([found[str(number)].to(device) for number in range(size)] for found in chunks)

    def _identity(self) -> dict[str, Any]:
        own = {"method": "Sam", "delay": self.delay, "rho": self.rho}
        return {**own, "chunk_size": self._learner.chunk_size, "seed": self._learner.seed}

    def _work(self, now: Any) -> Iterator[Work]:
        batch = self._learner.batch(now)
        same = described("Sam", delay=self.delay, rho=self.rho)
        failed = self._learner.begin_step(batch, same, delayed=self.delay > 0)
        count = count_chunks(batch, self._learner.chunk_size)
        shapes = [parameter.shape for parameter in self._parameters().values()]
        if failed or not self.delay or any([own.shape for own in direction] != shapes for direction in self._waiting):
            self._waiting.clear()  # left by a step that failed, or of other trainable weights
        if self.delay and not self._waiting:
            batch = batch if isinstance(batch, Batch) else Chunked(batch.count, list(batch.chunks))  # iterated twice
            self.prime(batch, self.step)
        if self.delay and len(self._waiting) != count:
            raise ValueError(
                f"a batch of {count} chunks, after one of {len(self._waiting)}: sam with delay 1 needs batches of one "
                "size (drop_last=True drops the smaller last one)"
            )
        for number, chunk in enumerate(self._learner.chunks(batch)):
            parts = self._learner.clean_parts(chunk, 1.0)
            self._waiting.append(self._uphill(parts, self.step, number, count))
            yield [part._replace(tracked=False, adversarial=True) for part in parts], number, count
            self._waiting.popleft()

    def _uphill(self, parts: list[Part], step: int, number: int, count: int) -> Direction:
        """The gradient of a chunk's loss at the current weights, scaled to length 1."""
        # Not through DistributedDataParallel, which expects one backward pass for each forward pass.
        # With copies of the images, on which a model may work in place.
        inner = [part._replace(call=partial(_call_unwrapped, part.call), images=part.images.clone()) for part in parts]
        total = self._learner.objective(inner, number, count, step)
        with self._learner.recomputing(inner):
            gradients = torch.autograd.grad(total, list(self._parameters().values()), allow_unused=True)
        known = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for gradient, parameter in zip(gradients, self._parameters().values(), strict=True)
        ]
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(known)))
        return list(torch._foreach_div(known, length.clamp_min(torch.finfo(length.dtype).tiny)))

    @contextmanager
    def _moved(self, direction: Direction) -> Iterator[None]:
        """Move the weights along a direction, within this context; a backward pass may recompute layers there."""
        parameters = list(self._parameters().values())
        kept = [parameter.data for parameter in parameters]
        try:
            for parameter, moved in zip(parameters, torch._foreach_add(kept, direction, alpha=self.rho), strict=True):
                parameter.data = moved
            torch.clear_autocast_cache()  # it holds the weights as they were, in 16 bits
            yield
        finally:
            torch.clear_autocast_cache()
            for parameter, own in zip(parameters, kept, strict=True):
                parameter.data = own

    def _parameters(self) -> dict[str, nn.Parameter]:
        own = unwrap(self._learner.model).named_parameters()
        return {name: parameter for name, parameter in own if parameter.requires_grad}


def _call_unwrapped(call: Call, model: nn.Module, images: Tensor) -> Any:
    return call(unwrap(model), images)
