"""Stragglers: a step lasts as long as its slowest rank, so the more ranks, the more of them it waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# A stream of draws for each role of a layout; there are at most three.
_STREAMS = 3


@dataclass(frozen=True)
class Stragglers:
    """Each rank's work takes its nominal time × (1 + jitter × e), e exponential with mean 1, afresh each step."""

    jitter: float
    samples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter {self.jitter}: give the mean delay as a fraction of the work, from 0 to below 1")
        if self.samples < 1:
            raise ValueError(f"samples {self.samples}: simulate at least 1 step")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed}: give a whole number, 0 or more")

    def draws(self) -> NDArray[np.float64]:
        """Uniform numbers in (0, 1): streams × samples."""
        return 1.0 - np.random.default_rng(self.seed).random((_STREAMS, self.samples))

    def slowest(self, ranks: int, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """The factor of the slowest of `ranks`, one a simulated step.

        The maximum of n draws with distribution function F is distributed as F⁻¹(u^(1/n)): one uniform number a
        step instead of n exponential ones, and the same number for every n, so that more ranks are never faster.
        """
        return 1.0 + self.jitter * -np.log(-np.expm1(np.log(uniform) / ranks))


def expected_slowest(ranks: int, jitter: float) -> float:
    """The mean factor in closed form: the maximum of n exponentials has mean 1 + 1/2 + … + 1/n."""
    return 1.0 + jitter * sum(1.0 / k for k in range(1, ranks + 1))
