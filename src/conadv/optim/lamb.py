"""LAMB: Adam in which the length of each tensor's update is that of its weights, times the learning rate.

    m     = beta1 · m + (1 - beta1) · g          v = beta2 · v + (1 - beta2) · g²
    u     = m / (1 - beta1^t) / (√(v / (1 - beta2^t)) + eps) + decay · w
    trust = |w| / |u|                            1 where |w| or |u| is 0, or without adapt
    w     = w - lr · trust · u

Algorithm 2 of You et al. (2020), with φ(z) = z. Without adapt it is AdamW. Some libraries leave out the bias
correction, clip |w| at 10 or scale the gradients by their global norm first; this one does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import LayerwiseOptimizer, norms


class Lamb(LayerwiseOptimizer):
    """LAMB, for example `Lamb(parameter_groups(model, weight_decay=0.01), lr=0.01)`.

    Every argument but `params` can also be set for one group, and `lr` may change before each step
    (`group["lr"] = ...`).

    Args:
        params: parameters, or groups of them as `parameter_groups` makes them.
        lr: length of an update relative to the length of the weights.
        betas: shares of the mean of the gradients and of the mean of their squares that are kept from step to step.
        eps: added to the root of the mean square, in the unit of a gradient.
        weight_decay: pull of the weights towards 0, inside the update whose length is normalized.
        adapt: False: a trust ratio of 1, which makes it AdamW.
        foreach: work on all tensors of a group at once, and never wait for the device, instead of on one tensor after
            the other. None: on GPUs only.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapt: bool = True,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adapt": adapt, "foreach": foreach})

    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], foreach: bool) -> None:
        update_lamb(weights, gradients, [self.state[weight] for weight in weights], group)


def update_lamb(
    weights: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]
) -> None:
    """Update weights of one device and dtype together, and their states."""
    for weight, state in zip(weights, states, strict=True):
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
        state["step"] += 1
    beta1, beta2 = group["betas"]
    averages = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    torch._foreach_lerp_(averages, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    sizes = torch._foreach_div(squares, [1 - beta2 ** state["step"] for state in states])
    torch._foreach_sqrt_(sizes)
    torch._foreach_add_(sizes, group["eps"])
    updates = list(torch._foreach_div(averages, [1 - beta1 ** state["step"] for state in states]))
    torch._foreach_div_(updates, sizes)
    if group["weight_decay"] != 0:
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
    if group["adapt"]:
        weight_norms, update_norms = norms(weights), norms(updates)
        trusts = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        torch._foreach_mul_(updates, list(trusts.unbind()))
    torch._foreach_add_(weights, updates, alpha=-group["lr"])
