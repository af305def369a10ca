"""Stragglers: a step lasts as long as its slowest rank, so more ranks mean longer waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# A stream of draws for each role of a layout; there are at most three.
_STREAMS = 3


@dataclass(frozen=True)
class Stragglers:
    """Each rank's work takes its nominal time × (1 + jitter × e), e exponential with mean 1, drawn anew each step."""

    jitter: float
    samples: int = 1000
    seed: int = 0

    @cached_property
    def draws(self) -> NDArray[np.float64]:
        """Uniform numbers in (0, 1]: streams × samples."""
        return 1.0 - np.random.default_rng(self.seed).random((_STREAMS, self.samples))

    def slowest(self, ranks: int, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor of the slowest of `ranks`, one per simulated step.

        The maximum of n draws with distribution function F is distributed as F⁻¹(u^(1/n)): one uniform number per
        step instead of n exponential ones, and the same number for every n, so that more ranks are never faster.
        """
        return 1.0 + self.jitter * -np.log(-np.expm1(np.log(uniform) / ranks))
