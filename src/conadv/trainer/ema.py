"""The exponential moving average (EMA) of the weights, which every rank computes from the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from conadv.core.twins import StaleWeights


class Ema:
    """average = decay · average + (1 - decay) · weights, after each update; buffers (running statistics) are copied.

    Args:
        model: the network; the average starts at its weights.
        decay: weight of the old average, so that it spans about 1 / (1 - decay) steps. 0: no average; all methods are
            no-ops.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._average = StaleWeights(model, 1 if decay else 0)

    def __bool__(self) -> bool:
        return self._decay > 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average; call it after each update."""
        for average in self._average.versions():
            state = self._model.state_dict(keep_vars=True)
            pairs = [(mine, state[name]) for name, mine in average.items()]
            weights = [pair for pair in pairs if isinstance(pair[1], nn.Parameter)]
            buffers = [pair for pair in pairs if not isinstance(pair[1], nn.Parameter)]
            torch._foreach_lerp_([mine for mine, _ in weights], [own for _, own in weights], 1 - self._decay)
            for mine, own in buffers:
                mine.copy_(own)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averaged weights within the context."""
        if not self:
            yield
            return
        with self._average.swapped_in():
            yield

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by the names of the model's state_dict; empty if there is none."""
        return {name: tensor for average in self._average.versions() for name, tensor in average.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        if self:
            self._average.load([tensors])
