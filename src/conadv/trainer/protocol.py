"""Changes to the plain protocol of a method: twins for a part of the run only, and gradients rescaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from conadv.core.branches import split_layers
from conadv.core.step import Method
from conadv.optim.signal import SignalToNoise


@dataclass(frozen=True)
class Protocol:
    """How a run uses its twins.

    Args:
        adv_weight: share of the twins in the loss, while there are any; 0: the method has none.
        last: the number of the first step that learns from the images alone.
        scales_norms: whether the gradients of BatchNorm's weight and bias are divided by the share of their branch in
            the loss. Each branch sees a part of the loss only, so that its own parameters learn more slowly than in
            plain training, and all others do not.
        signal: scales gradients by their signal-to-noise ratio; None: they are not.
    """

    adv_weight: float
    last: int
    scales_norms: bool = False
    signal: SignalToNoise | None = None

    def weight(self, step: int) -> float:
        """Return the share of the twins in the loss of a step."""
        return self.adv_weight if step < self.last else 0.0

    def begin_step(self, method: Method, step: int) -> None:
        """Switch the twins off when it is time."""
        if self.signal is not None:
            self.signal.begin()
        if self.adv_weight and step >= self.last:
            method.adv_weight = 0.0  # type: ignore[attr-defined]  # methods with twins have it

    @torch.no_grad()
    def scale(self, model: nn.Module, step: int) -> None:
        """Rescale the gradients of a step, before the update."""
        if self.signal is not None:
            self.signal.scale()
        if not self.scales_norms:
            return
        for layer in split_layers(model):
            shares = branch_shares(layer.branches, self.weight(step))
            for name, owner in layer.owners().items():
                for parameter in owner.parameters(recurse=False):
                    if parameter.grad is not None and shares[name] > 0:
                        parameter.grad.div_(shares[name])


def branch_shares(branches: tuple[str, ...], adv_weight: float) -> Mapping[str, float]:
    """Return the share of each BatchNorm branch in the loss; without a branch of their own, twins go through main."""
    clean = [name for name in branches if name != "adv"]
    rest = 1 - adv_weight if "adv" in branches else 1.0
    return {name: adv_weight if name == "adv" else rest / len(clean) for name in branches}
