"""Which parameters an optimizer adapts and decays."""

from __future__ import annotations

from typing import Any

from torch import nn


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
