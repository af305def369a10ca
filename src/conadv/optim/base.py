"""What optimizers share: which parameters they adapt and decay, and the loop over groups and tensors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: parameters that are adapted and decayed, and those that are neither.

    The second group has biases and the parameters of normalization layers (in every branch of a split one): vectors,
    anything named bias, and what belongs to a LayerNorm or RMSNorm over several dimensions.
    A shared parameter appears once, a frozen one not at all.

    Args:
        model: the network; split it first (`split_batchnorm`), so that every branch is in a group.
        weight_decay: of the first group; the second has none.

    Returns:
        Two groups with `params`, `weight_decay` and `adapt`, for `Lars` and `Lamb`; those of PyTorch ignore `adapt`.
    """
    plain = {
        parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim <= 1 or "bias" in name or isinstance(module, nn.LayerNorm | nn.RMSNorm)
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter to train: leave requires_grad on for some of them")
    return [
        {"params": [p for p in trained if p not in plain], "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in trained if p in plain], "weight_decay": 0.0, "adapt": False},
    ]


class LayerwiseOptimizer(Optimizer):
    """An optimizer whose groups have the option `foreach`: all tensors at once, one by one, or None: by device."""

    @abstractmethod
    def _update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], foreach: bool) -> None:
        """Update weights of one group, device and dtype; a single one without foreach."""

    def _momentum(self, weight: Tensor) -> Tensor:
        """The momentum of a weight, zeros at first."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, and return the closure's loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike = defaultdict(list)  # by device and dtype, as multi-tensor operations need them
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight.grad.layout != torch.strided:
                    kind = weight.grad.layout
                    raise ValueError(f"a {kind} gradient: this optimizer needs dense ones (Embedding: sparse=False)")
                alike[weight.device, weight.dtype].append(weight)
            for weights in alike.values():
                foreach = weights[0].device.type != "cpu" if group["foreach"] is None else group["foreach"]
                for part in [weights] if foreach else [[weight] for weight in weights]:
                    self._update(part, [weight.grad for weight in part], group, foreach)
        return loss


def norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, as one tensor, so that nothing waits for the device."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=norm_dtype(tensors[0])))


def norm_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a norm: a sum of squares needs more digits and range than a 16-bit number has."""
    return torch.promote_types(weight.dtype, torch.float32)


def _check(settings: dict[str, Any]) -> None:
    """Raise a ValueError if a setting of a group is wrong, whichever of them an optimizer has."""
    for name in ("lr", "weight_decay", "momentum", "trust_coefficient", "eps"):
        value = settings.get(name, 0.0)
        if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} {value!r}: take a number from 0 up")
    if settings.get("momentum", 0.0) >= 1:
        raise ValueError(f"momentum {settings['momentum']}: take a number from 0 to below 1, such as 0.9")
    if settings.get("trust_coefficient") == 0:
        raise ValueError("trust_coefficient 0 keeps every weight as it is: take 0.001, or adapt=False for SGD")
    betas = settings.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas!r}: take two numbers from 0 to below 1, such as (0.9, 0.999)")
    if "betas" in settings and settings["eps"] == 0:
        raise ValueError("eps 0 divides by 0 where a gradient is 0: take a small number such as 1e-6")
