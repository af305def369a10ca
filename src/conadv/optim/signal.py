"""Gradients scaled by their signal-to-noise ratio over the chunks of a batch: VR-SGD, VR-LARS and so on.

    g = mean of g_k      σ² = mean of g_k² - g²      r = g² / σ², divided by its mean over the tensor, within [floor, 1]
    g ← r · g            then the optimizer as usual

Jiang et al. (2023), with chunks in place of their devices. The gradients of the chunks come one after the other anyway:
it takes no further pass, only two more copies of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class SignalToNoise:
    """Watches gradients grow chunk by chunk, then scales them. One process only, whose chunks all have one size.

        signal = SignalToNoise(model.parameters())
        method = conadv.Vanilla(model, loss, chunk_size=64, after_chunk=signal.add)
        signal.begin(); method(batch); signal.scale(); optimizer.step()

    Args:
        parameters: whose gradients are scaled.
        floor: the smallest factor, above 0 and at most 1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], floor: float = 0.1) -> None:
        if not 0 < floor <= 1:
            raise ValueError(f"floor {floor}: the smallest factor of a gradient, above 0 and at most 1, such as 0.1")
        self._floor, self._chunks = floor, 0
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._before: dict[nn.Parameter, Tensor] = {}  # the gradient before this chunk
        self._squares: dict[nn.Parameter, Tensor] = {}  # the sum over the chunks of (g_k / chunks)²

    def begin(self) -> None:
        """Begin a step, after the gradients were cleared."""
        self._chunks = 0
        self._before, self._squares = {}, {}

    @torch.no_grad()
    def add(self) -> None:
        """Take note of the gradients that a chunk has added."""
        self._chunks += 1
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            added = parameter.grad - self._before.get(parameter, 0.0)
            self._before[parameter] = parameter.grad.clone()
            self._squares[parameter] = added.square_() + self._squares.get(parameter, 0.0)

    @torch.no_grad()
    def scale(self) -> None:
        """Scale the gradients of a step."""
        if self._chunks < 2:
            raise ValueError(f"{self._chunks} chunks in this step: the noise of gradients needs two or more")
        for parameter, squares in self._squares.items():
            assert parameter.grad is not None
            signal, power = parameter.grad.square(), squares * self._chunks
            # A variance below the rounding error of its terms is not known.
            noise = torch.maximum(power - signal, power * torch.finfo(power.dtype).eps)
            ratio = (signal / noise).nan_to_num_(nan=0.0)  # 0 / 0 where no chunk has a gradient
            parameter.grad *= (ratio / ratio.mean()).nan_to_num_(nan=0.0).clamp_(self._floor, 1)
