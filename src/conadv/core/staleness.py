"""How stale twins are: the quantities of the paper's Lemma 1 and Theorem 1, measured on one batch without a trace.

           ┌► attack with θ_{t-τ} ──► stale twins ┐
images ────┤                                      ├──► distance, signs, loss and gradient at θ_t ──► sums over chunks
           └► attack with θ_t ──────► fresh twins ┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attack import without_trace
from .batch import Batch, Chunked
from .handoff import Twin
from .learner import Learner
from .parts import Part
from .share import TwinShare
from .stale import StaleWeights
from .wrappers import unwrap

# (chunk, number of its batch, number of the chunk) -> its twins, with the current weights.
Generate = Callable[[Batch, int, int], Twin]


@dataclass
class Sums:
    """Sums over chunks, and then over ranks."""

    numbers: Tensor
    """Float64: chunks, squared norms of their gradients, images, and over these distance, agreement, stale and fresh
    loss."""
    farthest: Tensor
    """Float64, no sum: the largest distance of an image."""
    gradient: Tensor
    """Of the loss with fresh twins, by all trainable weights, as one vector."""
    error: Tensor
    """How much this changes with stale twins."""

    def metrics(self, drift: float) -> dict[str, float]:
        """The metrics of the batch, from complete sums; undefined ones are left out.

        Args:
            drift: ‖θ_t - θ_{t-τ}‖.
        """
        chunks, squares, images, distance, agreement, stale_loss, fresh_loss = self.numbers.tolist()
        norm, error = (_norm(vector) / chunks for vector in (self.gradient, self.error))
        metrics = {
            "stale_distance": distance / images,
            "stale_agreement": agreement / images,
            "weight_drift": drift,
            "stale_loss": stale_loss / images,
            "fresh_loss": fresh_loss / images,
            "gradient_norm": norm,
            "stale_gradient_norm": _norm(self.gradient + self.error) / chunks,
            "gradient_error": error,
        }
        if drift > 0:
            metrics["lemma1_constant"] = float(self.farthest) / drift
        if chunks > 1:  # the variance of a mean over chunks, from how the chunks differ
            metrics["gradient_variance"] = max(squares / chunks - norm**2, 0.0) / (chunks - 1)
        return metrics


class Staleness:
    """Compare the twins that a step learns from with those of fresh weights.

    Args:
        learner: the model and its loss.
        share: which chunks get twins; the others are left out.
        adv_weight: share of the twins in the loss.
        generate: makes the twins of a chunk.
        lag: steps from a batch to the step that learns from its twins.
    """

    def __init__(self, learner: Learner, share: TwinShare, adv_weight: float, generate: Generate, lag: int = 0) -> None:
        self._learner = learner
        self._share = share
        self._adv_weight = adv_weight
        self._generate = generate
        self._lag = lag

    def batch_of(self, step: int) -> int:
        """The number of the batch whose twins a step learns from."""
        return max(step - self._lag, 0)

    @torch.no_grad()
    def drift(self, stale: StaleWeights) -> float:
        """‖θ_t - θ_{t-τ}‖ over the trainable weights."""
        own = unwrap(self._learner.model).named_parameters()
        oldest = (stale.versions() or [{}])[0]
        moved = [(weight - oldest[name]).double() for name, weight in own if weight.requires_grad and name in oldest]
        return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in moved))

    def measure(self, chunks: Iterable[tuple[int, Any]], step: int, stale: StaleWeights) -> Sums:
        """Measure some chunks of `batch_of(step)`, before the update of `step`.

        Args:
            chunks: pairs of the number of a chunk, counted from this process' first one, and the chunk.
            step: whose weights the model has.
            stale: the weights of τ steps ago, the oldest that it keeps; without any, twins are fresh.
        """
        size = sum(own.numel() for own in unwrap(self._learner.model).parameters() if own.requires_grad)
        device, batch_number = self._learner.device, self.batch_of(step)
        numbers, farthest = (torch.zeros(length, dtype=torch.float64, device=device) for length in (7, 1))
        zeros = torch.zeros(2, size, dtype=self._learner.dtype, device=device)
        sums = Sums(numbers, farthest, zeros[0], zeros[1])
        for number, raw in chunks:
            if self._learner.has_twins(self._share, batch_number, number):
                (chunk,) = self._learner.chunks(Chunked(1, [raw]))
                fresh = self._generate(chunk, batch_number, number)
                with stale.swapped_in() if stale.versions() else nullcontext():
                    old = self._generate(chunk, batch_number, number)
                self._add(sums, chunk, old, fresh, step, number)
        return sums

    def _add(self, sums: Sums, chunk: Batch, old: Twin, fresh: Twin, step: int, number: int) -> None:
        distances = (fresh.images - old.images).double().flatten(1).norm(dim=1)
        agreement = (fresh.images - chunk.images).sign() == (old.images - chunk.images).sign()
        old_loss, old_gradient = self._gradient(self._learner.adv_part(old, self._adv_weight), step, number)
        loss, gradient = self._gradient(self._learner.adv_part(fresh, self._adv_weight), step, number)
        error = old_gradient - gradient
        for part in self._learner.clean_parts(chunk, 1 - self._adv_weight):
            gradient += self._gradient(part, step, number)[1]
        images = len(distances)
        means = (1.0, distances.mean(), agreement.double().mean(), old_loss, loss)
        per_image = torch.stack([images * torch.as_tensor(mean).to(sums.numbers) for mean in means])
        square = gradient.double().square().sum()
        sums.numbers += torch.cat([torch.stack([torch.ones_like(square), square]), per_image])
        sums.farthest.copy_(torch.maximum(sums.farthest, distances.max()))
        sums.gradient += gradient
        sums.error += error

    def _gradient(self, part: Part, step: int, number: int) -> tuple[Tensor, Tensor]:
        """The loss of a part, and its gradient by the weights times the weight of the part, as one vector."""
        model = unwrap(self._learner.model)
        seed = self._learner.pass_seed(step, number, part.branch)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad(), without_trace(model, part.branch, None, seed):
            with self._learner.autocasting():
                loss = self._learner.loss(part.call(model, part.images.detach().clone()), part.labels)
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        known = zip(found, weights, strict=True)
        gradients = [torch.zeros_like(own) if gradient is None else gradient for gradient, own in known]
        return loss.detach(), part.weight * torch.cat([gradient.flatten() for gradient in gradients])


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector.double()))
