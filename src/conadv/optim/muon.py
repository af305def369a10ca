"""Muon: momentum SGD in which the update of each matrix is made orthogonal, so that no direction dominates it.

    m = momentum · m + (1 - momentum) · g          u = (1 - momentum) · g + momentum · m      (Nesterov)
    o = u / |u|, then five times  o = a · o + (b · o oᵀ + c · (o oᵀ)²) o                      (Newton-Schulz)
    w = w - lr · decay · w - lr · 0.2 · √max(rows, columns) · o

Jordan et al. (2024). The factor of o is that of Liu et al. (2025): an update is as large as one of AdamW, so that one
learning rate serves both. A convolution kernel is a matrix with one row per output channel. Without adapt it is AdamW.
torch.optim.Muon(adjust_lr_fn="match_rms_adamw") is the same for matrices, in bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import LayerwiseOptimizer, norm_dtype
from .lamb import update_lamb

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_SIZE = 0.2  # root mean square of an update of AdamW


class Muon(LayerwiseOptimizer):
    """Muon, for example `Muon(parameter_groups(model, weight_decay=0.1), lr=0.01)`.

    Every argument but `params` can also be set for one group. A group with `adapt=False` takes AdamW, which
    biases and the parameters of normalization layers need. `lr` may change before each step (`group["lr"] = ...`).

    Args:
        params: parameters, or groups of them as `parameter_groups` makes them; adapted ones are matrices or kernels.
        lr: learning rate, as for AdamW.
        momentum: share of the mean of the gradients that is kept from step to step, from 0 to below 1.
        betas: of AdamW, without adapt.
        eps: of AdamW, without adapt.
        weight_decay: pull of the weights towards 0, in units of `lr`.
        adapt: False: AdamW.
        foreach: without adapt, work on all tensors of a group at once. None: on GPUs only.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adapt: bool = True,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adapt": adapt, "foreach": foreach})

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], foreach: bool) -> None:
        if not group["adapt"]:
            update_lamb(weights, gradients, [self.state[weight] for weight in weights], group)
            return
        for weight, gradient in zip(weights, gradients, strict=True):
            if weight.ndim < 2:
                raise ValueError("Muon needs matrices: take the groups of conadv.parameter_groups for the rest")
            mean = self._momentum(weight).lerp_(gradient, 1 - group["momentum"])
            update = orthogonalized(gradient.lerp(mean, group["momentum"]).flatten(1))
            size = _SIZE * math.sqrt(max(update.shape))
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.view(weight.shape).to(weight.dtype), alpha=-group["lr"] * size)


def orthogonalized(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors whose singular values are near 1 (0.7 to 1.2, unless they were tiny)."""
    tall = matrix.shape[0] > matrix.shape[1]
    own = (matrix.T if tall else matrix).to(norm_dtype(matrix))
    own = own / own.norm().clamp(min=1e-7)
    for _ in range(_ROUNDS):
        gram = own @ own.T
        own = torch.addmm(own, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), own, beta=_A)
    return (own.T if tall else own).contiguous()
