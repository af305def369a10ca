"""How sharp a minimum is: Hessian-vector products, Lanczos, Hutchinson, and the largest loss nearby.

batches ──► loss ──► gradient ──► Hessian · vector ──┬► Lanczos: the largest eigenvalues
                                                     └► Hutchinson: the trace
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from conadv.core.seeds import centered, mix

_START, _PROBE = 1, 2  # separate streams of random numbers
Product = Callable[[Tensor], Tensor]


class Surface:
    """The mean loss over fixed batches, as a function of the weights as one vector.

    Args:
        loss: from images and labels to the mean loss, with its graph; it must be deterministic.
        weights: weights of the network; those that the loss does not depend on are left out.
        batches: batches of (images, labels), on the device of the network.
    """

    def __init__(
        self, loss: Callable[[Tensor, Any], Tensor], weights: Sequence[nn.Parameter], batches: Sequence[Any]
    ) -> None:
        self._own_loss = loss
        self._batches = batches
        self._images = sum(len(images) for images, _ in batches)
        trained = [weight for weight in weights if weight.requires_grad]
        used = torch.autograd.grad(self._loss(*batches[0]), trained, allow_unused=True)
        self.weights = [weight for weight, gradient in zip(trained, used, strict=True) if gradient is not None]

    @property
    def point(self) -> Tensor:
        """The current weights."""
        return _flat([weight.detach() for weight in self.weights])

    @torch.no_grad()
    def value(self) -> float:
        return sum(float(self._loss(*batch)) * len(batch[0]) for batch in self._batches) / self._images

    def gradient(self) -> Tensor:
        return self._sum(lambda loss: torch.autograd.grad(loss, self.weights))

    def times_hessian(self, vector: Tensor) -> Tensor:
        """The Hessian times a vector, by a second backward pass."""
        parts = vector.split([weight.numel() for weight in self.weights])
        shaped = [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)]

        def product(loss: Tensor) -> Sequence[Tensor | None]:
            gradients = torch.autograd.grad(loss, self.weights, create_graph=True)
            curved = [(one, own) for one, own in zip(gradients, shaped, strict=True) if one.requires_grad]
            ends, directions = zip(*curved, strict=True)
            return torch.autograd.grad(ends, self.weights, directions, allow_unused=True)

        try:
            return self._sum(product)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            problem = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"the network has no second derivative, which sharpness needs ({problem}): replace that operation"
            ) from error

    @contextmanager
    def moved(self, step: Tensor) -> Iterator[None]:
        """Move the weights by a step, and restore them afterwards."""
        kept = [weight.data for weight in self.weights]
        parts = step.split([weight.numel() for weight in self.weights])
        try:
            for weight, part in zip(self.weights, parts, strict=True):
                weight.data = weight.data + part.view_as(weight)
            yield
        finally:
            for weight, own in zip(self.weights, kept, strict=True):
                weight.data = own

    def _loss(self, images: Tensor, labels: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
            return self._own_loss(images, labels)

    def _sum(self, derivative: Callable[[Tensor], Sequence[Tensor | None]]) -> Tensor:
        """Mean over all images of a derivative of the loss."""
        total = torch.zeros_like(self.point)
        for images, labels in self._batches:
            found = derivative(self._loss(images, labels))
            known = [
                torch.zeros_like(own) if one is None else one for one, own in zip(found, self.weights, strict=True)
            ]
            total += _flat(known) * (len(images) / self._images)
        return total


@dataclass(frozen=True)
class Eigenvalues:
    """The largest eigenvalues, in descending order; each is exact to within its residual."""

    values: list[float]
    residuals: list[float]
    vector: Tensor
    """Eigenvector of the largest one, of length 1."""


def largest_eigenvalues(product: Product, start: Tensor, count: int, iterations: int, tolerance: float) -> Eigenvalues:
    """Find the largest eigenvalues of a symmetric matrix by Lanczos; one that occurs twice is found once.

    Args:
        product: from a vector to the matrix times that vector.
        start: a vector that is not orthogonal to the eigenvectors, such as a random one.
        count: number of eigenvalues.
        iterations: largest number of products.
        tolerance: stop when each residual is below this fraction of the largest eigenvalue.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        found = product(basis[-1])
        diagonal.append(float(found @ basis[-1]))
        for _ in range(2):  # orthogonalize twice, because digits cancel
            for known in basis:
                found -= (found @ known) * known
        length = float(found.norm())
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            sides = torch.tensor(beside, dtype=torch.float64)
            tridiagonal += torch.diag(sides, 1) + torch.diag(sides, -1)
        values, vectors = torch.linalg.eigh(tridiagonal)
        residuals = (length * vectors[-1].abs()).flip(0)[:count]
        scale = float(values.abs().max())
        enough = len(diagonal) >= count and bool((residuals <= tolerance * scale).all())
        if enough or len(diagonal) >= min(iterations, len(start)) or length <= 1e-7 * scale:
            top = sum((float(share) * one for share, one in zip(vectors[:, -1], basis, strict=True)), 0 * start)
            return Eigenvalues(values.flip(0)[:count].tolist(), residuals.tolist(), top)
        beside.append(length)
        basis.append(found / length)


def trace(product: Product, like: Tensor, probes: int, seed: int = 0) -> tuple[float, float]:
    """Estimate the trace of a matrix by Hutchinson's method: the mean of zᵀHz over random signs z.

    Returns:
        The estimate, and its standard error (NaN with a single probe).
    """
    samples = []
    for number in range(probes):
        signs = centered(like.shape, mix(seed, _PROBE, number), like).sign_()
        samples.append(float(product(signs) @ signs))
    found = torch.tensor(samples, dtype=torch.float64)
    return float(found.mean()), float(found.std() / probes**0.5) if probes > 1 else math.nan


def random_start(like: Tensor, seed: int = 0) -> Tensor:
    """A random vector to start Lanczos from, the same for the same seed."""
    return centered(like.shape, mix(seed, _START), like)


def worst_value(surface: Surface, radius: float, starts: Sequence[Tensor], steps: int) -> float:
    """The largest loss found at distance `radius`: a lower bound of the maximum over the ball.

    From each start direction, with either sign, repeat: go to the point of the sphere in the direction of the current
    gradient. A maximum on the sphere is a fixed point.
    """
    worst = surface.value()
    for start in (sign * start for start in starts for sign in (1, -1)):
        direction = start
        for _ in range(steps):
            with surface.moved(radius * direction / direction.norm()):
                worst = max(worst, surface.value())
                direction = surface.gradient()
    return worst


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
