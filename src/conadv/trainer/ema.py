"""The exponential moving average (EMA) of the weights of a run, which every rank keeps: all hold the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from conadv.core.stale import StaleWeights


class Ema:
    """average = decay · average + (1 - decay) · weights after each update; buffers, as of BatchNorm, are copied.

    Args:
        model: the network; the average starts at its weights.
        decay: share of the average that a step keeps, so that it reaches back over about 1 / (1 - decay) steps.
            0: there is no average, and everything here does nothing.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._average = StaleWeights(model, 1 if decay else 0)

    def __bool__(self) -> bool:
        return self._decay > 0

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after an update."""
        for average in self._average.versions():
            pairs = [(average[name], own) for name, own in self._model.state_dict(keep_vars=True).items()]
            weights = [pair for pair in pairs if isinstance(pair[1], nn.Parameter)]
            buffers = [pair for pair in pairs if not isinstance(pair[1], nn.Parameter)]
            torch._foreach_lerp_([mine for mine, _ in weights], [own for _, own in weights], 1 - self._decay)
            for mine, own in buffers:
                mine.copy_(own)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within, the model has the average weights."""
        if not self:
            yield
            return
        with self._average.swapped_in():
            yield

    def tensors(self) -> dict[str, Tensor]:
        """The average by the names of the model's state_dict; empty without one."""
        return {name: tensor for average in self._average.versions() for name, tensor in average.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` returned."""
        if self:
            self._average.load([tensors])
