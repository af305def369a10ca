"""Weights of earlier steps, kept so that twins can be made with them later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StaleWeights:
    """The weights of the last `delay` steps: what twins in flight were made with, and can be made with again.

    They take the place of the twins in a checkpoint, which so does not grow with the batch; and where one rank attacks
    and learns, in memory too.
    """

    def __init__(self, model: nn.Module, delay: int) -> None:
        self._model = model
        self._kept = deque({name: torch.clone(own.detach()) for name, own in self._own()} for _ in range(delay))

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the weights as they are now, before an update, in place of the oldest."""
        if self._kept:
            self._kept.rotate(-1)
            for name, own in self._own():
                self._kept[-1][name].copy_(own)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within, the model has the oldest weights: those of `delay` steps ago."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def versions(self) -> list[dict[str, Tensor]]:
        """Oldest first."""
        return list(self._kept)

    def load(self, versions: list[dict[str, Tensor]]) -> None:
        for kept, version in zip(self._kept, versions, strict=True):
            for name, tensor in version.items():
                kept[name].copy_(tensor)

    def _swap(self) -> None:
        oldest = self._kept[0]
        # A weight that the model uses under two names is swapped once.
        for own, old in {id(own): (own, oldest[name]) for name, own in self._own()}.values():
            own.data, old.data = old.data, own.data

    def _own(self) -> Iterable[tuple[str, Tensor]]:
        """The model's tensors themselves, asked for anew: a model may put another in the place of a buffer."""
        return self._model.state_dict(keep_vars=True).items()
