"""LARS: momentum SGD in which each tensor's learning rate is in proportion to the size of its weights.

    trust = coefficient · |w| / (|g| + decay · |w| + eps)      1 where |w| or |g| is 0, or without adapt
    v     = momentum · v + lr · trust · (g + decay · w)        v is not rescaled when lr changes
    w     = w - v

As You, Gitman and Ginsburg (2017) and the reference of MLPerf define it. Many libraries multiply by lr only
after the momentum, which is the same at a constant lr and another method at a changing one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import LayerwiseOptimizer, norms


class Lars(LayerwiseOptimizer):
    """LARS, for example `Lars(parameter_groups(model, weight_decay=5e-4), lr=10.0)`.

    Every argument but `params` can also be set for one group. A group with `adapt=False` takes plain momentum
    SGD. `lr` may change before each step (`group["lr"] = ...`).

    Args:
        params: parameters, or groups of them as `parameter_groups` makes them.
        lr: learning rate, before it is multiplied by the trust ratio of each tensor.
        momentum: share of the last update that is kept, from 0 to below 1.
        weight_decay: pull of the weights towards 0, added to the gradient.
        trust_coefficient: length of an update relative to the length of the weights, at learning rate 1.
        eps: added to the length of the gradient in the trust ratio.
        adapt: False: a trust ratio of 1, which makes it SGD with momentum.
        foreach: work on all tensors of a group at once, and never wait for the device, instead of on one tensor after
            the other. None: on GPUs, where launching kernels is the cost; not on the CPU, where cache misses are.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        *,
        adapt: bool = True,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps}
        super().__init__(
            params, {**defaults, "trust_coefficient": trust_coefficient, "adapt": adapt, "foreach": foreach}
        )

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], foreach: bool) -> None:
        kept = group["momentum"] != 0
        velocities = [self._momentum(weight) if kept else torch.zeros_like(weight) for weight in weights]
        if foreach:
            _update_together(weights, gradients, velocities, group)
        else:
            _update_one(weights[0], gradients[0], velocities[0], group)


def _update_one(weight: Tensor, gradient: Tensor, velocity: Tensor, group: dict[str, Any]) -> None:
    rate, decay = group["lr"], group["weight_decay"]
    if group["adapt"]:
        weight_norm, gradient_norm = norms([weight, gradient]).tolist()
        if weight_norm > 0 and gradient_norm > 0:
            size = gradient_norm + decay * weight_norm + group["eps"]
            rate *= group["trust_coefficient"] * weight_norm / size
    velocity.mul_(group["momentum"]).add_(gradient, alpha=rate)
    if decay != 0:
        velocity.add_(weight, alpha=rate * decay)
    weight.sub_(velocity)


def _update_together(
    weights: list[Tensor], gradients: list[Tensor], velocities: list[Tensor], group: dict[str, Any]
) -> None:
    """The same without waiting for the device: trust ratios are tensors without dimensions."""
    decay = group["weight_decay"]
    updates = torch._foreach_add(gradients, weights, alpha=decay)
    if group["adapt"]:
        weight_norms, gradient_norms = norms(weights), norms(gradients)
        ratios = group["trust_coefficient"] * weight_norms / (gradient_norms + decay * weight_norms + group["eps"])
        trusts = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)
        torch._foreach_mul_(updates, list(trusts.unbind()))
    torch._foreach_mul_(velocities, group["momentum"])
    torch._foreach_add_(velocities, updates, alpha=group["lr"])
    torch._foreach_sub_(weights, velocities)
