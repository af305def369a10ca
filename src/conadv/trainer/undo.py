"""Undo an update on the device if a number of its step was not finite, while the host does not wait to know.

keep ──► update ──► undo_unless(finite): every tensor = finite · new + (1 - finite) · old, on bit patterns
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .ema import Ema

# Integers as wide as a tensor's elements: NaN times 0 would not be 0.
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Undo:
    """A copy of the state that an update changes: weights, buffers, optimizer state, moving average.

    Args:
        model: the network.
        optimizer: `undo_unless` restores its tensors on the device, `undo_counts` what it has on the host.
        ema: the moving average of the weights.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ema: Ema) -> None:
        self._model, self._optimizer, self._ema = model, optimizer, ema
        self._device = next(model.parameters()).device
        self.is_ready = False
        """Whether the optimizer has made its first update, which creates its state."""
        self._copies: list[Tensor] = []
        self._counts: list[tuple[dict[str, Any], str, Any]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the state before an update."""
        assert self.is_ready
        tensors = self._tensors()
        if not self._copies:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._copies, tensors)
        self._counts = [
            (state, key, value.clone() if isinstance(value, Tensor) else value)
            for state in self._optimizer.state.values()
            for key, value in state.items()
            if not self._is_on_device(value)
        ]

    @torch.no_grad()
    def undo_unless(self, finite: Tensor) -> None:
        """Restore every tensor on the device to the bit, unless `finite` (a bool scalar on the device) is true."""
        groups: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for new, old in zip(self._tensors(), self._copies, strict=True):
            pattern = _PATTERNS[new.element_size()]
            groups[pattern][0].append(new.view(pattern))
            groups[pattern][1].append(old.view(pattern))
        for pattern, (new_ones, old_ones) in groups.items():
            factor = finite.to(pattern)
            torch._foreach_mul_(new_ones, factor)
            torch._foreach_mul_(old_ones, 1 - factor)
            torch._foreach_add_(new_ones, old_ones)

    def undo_counts(self) -> None:
        """Restore the optimizer state on the host, such as step counts, once it is known that the step was skipped."""
        for state, key, value in self._counts:
            state[key] = value

    def _tensors(self) -> list[Tensor]:
        # A weight that the model uses under two names is listed once.
        model = {id(tensor): tensor for tensor in self._model.state_dict(keep_vars=True).values()}.values()
        states = self._optimizer.state.values()
        remembered = [value for state in states for value in state.values() if self._is_on_device(value)]
        return [tensor.detach() for tensor in (*model, *remembered, *self._ema.tensors().values())]

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._device
