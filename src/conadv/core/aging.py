"""Stale weights that age with updates of the model, not with calls: gradients may be accumulated over several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .stale import StaleWeights


class Aging:
    """The weights of `delay` updates ago, for a method that is called once or more often per update.

    Weights that were not changed since the last call belong to the same update: gradients are being accumulated. From
    then on one more version is kept, since the oldest is needed by every call of an update.

    Args:
        model: the network.
        delay: age of the stale weights, in updates; 0: none are kept.
    """

    def __init__(self, model: nn.Module, delay: int) -> None:
        self._stale = StaleWeights(model, delay)
        self._delay = delay
        self._seen: list[int] = []  # PyTorch's counters of changes to each weight, at the last call
        self._began = False
        self._updated: bool | None = None  # since the last call, as a loaded state says
        self._same = False

    def begin(self) -> None:
        """Check, before the attacks of a call, whether the weights were updated since the last call."""
        if not self._delay:
            return
        if not self._began and self._updated is None:
            self._stale.reset()  # the weights at the start: the model may have been loaded since the method was made
        self._same = self._began_or_loaded and not self._is_updated()
        if self._same and len(self._stale.versions()) == self._delay:
            self._stale.extend()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the weights of `delay` updates ago, within this context."""
        with self._stale.swapped_in(0 if self._same else len(self._stale.versions()) - self._delay):
            yield

    def keep(self) -> None:
        """Keep the weights of this call, unless an earlier call of the same update did."""
        if not self._delay:
            return
        if not self._same:
            self._stale.keep()
        self._seen, self._began, self._updated = self._counters(), True, None

    def reset(self) -> None:
        """Start again with the current weights."""
        self._stale.reset()
        self._began, self._updated = False, None

    def state(self) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
        """The counters of a state, and the versions, oldest first."""
        versions = self._stale.versions()
        return {"versions": len(versions), "updated": bool(self._delay) and self._is_updated()}, versions

    def load(self, about: dict[str, Any], versions: list[dict[str, Tensor]]) -> None:
        self._stale.load(versions)
        self._updated = about.get("updated", True)

    @property
    def _began_or_loaded(self) -> bool:
        return self._began or self._updated is not None

    def _is_updated(self) -> bool:
        """Whether the weights were changed since the last call.

        Optimizers that write to `.data` do not move the counters, so weights are compared if the counters are equal.
        """
        if self._updated is not None:
            return self._updated
        return self._seen != self._counters() or not self._stale.is_newest()

    def _counters(self) -> list[int]:
        return [weight._version for weight in self._stale.trained()]
