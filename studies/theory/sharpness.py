"""How sharp the minima are that vanilla and ConAdv end in, by batch size: eigenvalues and trace of the Hessian.

    python studies/theory/sharpness.py --steps 300 --seeds 3

The scale of a weight in front of BatchNorm does not change the network but it changes the Hessian, so λ·‖θ‖² is what
to compare.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

import conadv
from small_task import Images, arguments, load, table, train

BATCHES = (50, 500)


class Hessian:
    """The Hessian of the loss in a branch with its running statistics, by the weights that the branch uses."""

    def __init__(self, model: nn.Module, branch: str, batch: Images) -> None:
        self._model, self._branch, self._batch = model.eval(), branch, batch
        weights = list(model.parameters())
        used = torch.autograd.grad(self._loss(), weights, allow_unused=True)
        self.weights = [own for own, one in zip(weights, used, strict=True) if one is not None]
        self.size = sum(own.numel() for own in self.weights)

    def _loss(self) -> Tensor:
        images, labels = self._batch
        with conadv.route(self._model, self._branch, statistics="running", tracking="off"):
            return F.cross_entropy(self._model(images), labels)

    def times(self, vector: np.ndarray) -> np.ndarray:
        """The Hessian times a vector, by a second backward pass."""
        along = torch.from_numpy(np.asarray(vector, dtype=np.float64).ravel()).to(self.weights[0])
        first = torch.autograd.grad(self._loss(), self.weights, create_graph=True)
        product = torch.cat([one.flatten() for one in first]) @ along
        second = torch.autograd.grad(product, self.weights, allow_unused=True)
        known = [torch.zeros_like(own) if one is None else one for one, own in zip(second, self.weights, strict=True)]
        return torch.cat([one.flatten() for one in known]).double().numpy()

    def largest(self, count: int = 1) -> list[float]:
        """The largest eigenvalues, by Lanczos."""
        operator = LinearOperator((self.size, self.size), matvec=self.times, dtype=np.float64)
        start = np.random.default_rng(0).normal(size=self.size)
        found = eigsh(operator, k=count, which="LA", v0=start, tol=1e-3, return_eigenvectors=False)
        return sorted(found.tolist(), reverse=True)

    def trace(self, probes: int = 20) -> float:
        """The mean of zᵀHz over random signs z (Hutchinson)."""
        random = np.random.default_rng(0)
        signs = [random.choice([-1.0, 1.0], self.size) for _ in range(probes)]
        return fmean(float(one @ self.times(one)) for one in signs)


def measure(model: nn.Module, batch: Images) -> dict[str, float]:
    """The sharpness of the main branch on some images."""
    hessian = Hessian(model, "main", batch)
    norm = sum(float(own.detach().square().sum()) for own in hessian.weights)
    (largest,) = hessian.largest()
    return {"eigenvalue": largest, "trace": hessian.trace(), "eigenvalue_norm2": largest * norm}


def main() -> None:
    given = arguments((__doc__ or "").splitlines()[0], steps=300, seeds=3, images=512)
    data = load(given.data)
    sample = (data[0][: given.images], data[1][: given.images])
    rows = []
    for batch_size in BATCHES:
        for delay in (None, 1):
            ends = []
            for seed in range(given.seeds):
                *_, (model, _, _) = train(data, delay, batch_size, given.steps, seed)
                ends.append(measure(model, sample))
            means = {name: fmean(one[name] for one in ends) for name in ends[0]}
            rows.append({"batch": float(batch_size), "conadv": float(delay is not None), **means})
    print(table(rows))


if __name__ == "__main__":
    main()
