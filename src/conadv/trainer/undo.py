"""Takes back, on the device, an update whose numbers were not finite: the host need not wait to know whether they were.

keep ──► update ──► undo_unless(finite): every tensor = finite · new + (1 - finite) · old, as bit patterns
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .ema import Ema

# Whole numbers as wide as a tensor's elements: not-a-number times 0 would not be 0.
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Undo:
    """The state that an update changes, as it was before.

    Args:
        model: the network, whose weights and buffers an update changes.
        optimizer: what it remembers on the device is put back there; counts that the host keeps, by `undo_counts`.
        ema: the moving average of the weights.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, ema: Ema) -> None:
        self._model, self._optimizer, self._ema = model, optimizer, ema
        self._device = next(model.parameters()).device
        self.is_ready = False
        """Whether the optimizer has made an update, after which it remembers all that it ever will."""
        self._kept: list[Tensor] = []
        self._counts: list[tuple[dict[str, Any], str, Any]] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the state before an update."""
        assert self.is_ready
        own = self._own()
        if not self._kept:
            self._kept = [torch.empty_like(tensor) for tensor in own]
        torch._foreach_copy_(self._kept, own)
        self._counts = [
            (state, key, value.clone() if isinstance(value, Tensor) else value)
            for state in self._optimizer.state.values()
            for key, value in state.items()
            if not self._is_here(value)
        ]

    @torch.no_grad()
    def undo_unless(self, finite: Tensor) -> None:
        """Put everything on the device back, bit by bit, unless `finite` (bool, without dimensions) is true there."""
        groups: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for new, old in zip(self._own(), self._kept, strict=True):
            pattern = _PATTERNS[new.element_size()]
            groups[pattern][0].append(new.view(pattern))
            groups[pattern][1].append(old.view(pattern))
        for pattern, (new_ones, old_ones) in groups.items():
            factor = finite.to(pattern)
            torch._foreach_mul_(new_ones, factor)
            torch._foreach_mul_(old_ones, 1 - factor)
            torch._foreach_add_(new_ones, old_ones)

    def undo_counts(self) -> None:
        """Put back what the host counts, once it knows that the step was left out."""
        for state, key, value in self._counts:
            state[key] = value

    def _own(self) -> list[Tensor]:
        remembered = [value for state in self._optimizer.state.values() for value in state.values()]
        model = list({id(own): own for own in self._model.state_dict(keep_vars=True).values()}.values())
        here = [tensor for tensor in remembered if self._is_here(tensor)]
        return [tensor.detach() for tensor in (*model, *here, *self._ema.tensors().values())]

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._device
