"""What LARS, LAMB and Muon have in common: the loop over groups and tensors, and checks of their settings."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class LayerwiseOptimizer(Optimizer):
    """An optimizer whose groups have the option `foreach`: all tensors at once, one by one, or None: by device."""

    @abstractmethod
    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], foreach: bool) -> None:
        """Update weights of one group, device and dtype."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, and return the closure's loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights, gradients in _with_gradients(group["params"]):
                foreach = weights[0].device.type != "cpu" if group["foreach"] is None else group["foreach"]
                self._update(weights, gradients, group, foreach)
        return loss


def _check(group: dict[str, Any]) -> None:
    """Raise a ValueError if a setting of a group is wrong, whichever of them this optimizer has."""
    for name in ("lr", "weight_decay", "trust_coefficient", "eps", "momentum"):
        value = group.get(name, 0)
        if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value!r}: take a number from 0 up")
    betas = group.get("betas", (0, 0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas!r}: take two numbers from 0 to below 1, such as (0.9, 0.999)")
    if group.get("momentum", 0) >= 1:
        raise ValueError(f"momentum {group['momentum']}: take a number from 0 to below 1, such as 0.9")
    if "betas" in group and group["eps"] == 0:
        raise ValueError("eps 0 divides by 0 where a gradient is 0: take a small number such as 1e-6")
    if group.get("trust_coefficient") == 0:
        raise ValueError("trust_coefficient 0 keeps every weight as it is: take 0.001, or adapt=False for SGD")


def norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, as one tensor, so that nothing waits for the device."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=norm_dtype(tensors[0])))


def norm_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a norm: a sum of squares needs more digits and range than a 16-bit number has."""
    return torch.promote_types(weight.dtype, torch.float32)


def _with_gradients(parameters: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Weights and their gradients, one pair of lists per device and dtype, as multi-tensor operations need them."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for weight in parameters:
        if weight.grad is None:
            continue
        if weight.grad.layout != torch.strided:
            raise ValueError(
                f"a {weight.grad.layout} gradient: this optimizer needs dense ones (Embedding: sparse=False)"
            )
        weights, gradients = alike[weight.device, weight.dtype]
        weights.append(weight)
        gradients.append(weight.grad)
    return list(alike.values())
