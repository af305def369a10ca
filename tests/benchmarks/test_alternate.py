"""The alternating timer on a clock that only moves when told to, and its statistics against SciPy and by hand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from scipy.stats import binom

from alternate import alternate, compare


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def takes(self, name: str, seconds: float):
        def run() -> None:
            self.ran.append(name)
            self.now += seconds

        return run


def test_every_round_runs_each_once_and_begins_with_the_next() -> None:
    clock = Clock()
    laps = alternate({name: clock.takes(name, 1 + "ABC".index(name)) for name in "ABC"}, 3, clock=clock)
    assert "".join(clock.ran) == "ABCBCACABABC"
    assert laps == {"A": [1] * 3, "B": [2] * 3, "C": [3] * 3}  # without the round of warm-up


def test_preparing_comes_before_each_lap_and_is_not_timed() -> None:
    clock = Clock()
    laps = alternate({name: clock.takes(name, 1) for name in "AB"}, 1, clock.takes("prepare", 7), clock)
    assert clock.ran == ["prepare", "A", "prepare", "B", "prepare", "B", "prepare", "A"]
    assert laps == {"A": [1], "B": [1]}


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine was ten times slower in the second round: the ratio does not see it, a ratio of medians would.
    found = compare({"A": [2, 20, 3], "B": [1, 10, 1]}, "A", "B")
    assert (found.name, found.median, found.rounds) == ("A/B", 2.0, 3)


@pytest.mark.parametrize("n", [6, 7, 20, 59])
def test_percentiles_and_the_interval_of_the_median(n: int) -> None:
    values = np.random.default_rng(n).permutation(np.arange(1.0, n + 1)).tolist()
    found = compare({"A": values, "B": [1.0] * n}, "A", "B")
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    assert (found.low, found.median, found.high) == pytest.approx((deciles[0], deciles[4], deciles[8]))
    rank = int(found.median_low)  # the values are their own ranks
    assert found.median_high == n + 1 - rank
    assert 1 - 2 * binom.cdf(rank - 1, n, 0.5) >= 0.95 > 1 - 2 * binom.cdf(rank, n, 0.5)
