"""Ratios and their spread, against the standard library, SciPy and a simulation."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from conadv.study.bench.alternate import Lap
from conadv.study.bench.result import Goal, Result, Spread, compare, wall_time, work_ratio

figures = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


@given(figures)
def test_median_and_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    spread = Spread.of(values)
    deciles = statistics.quantiles(values * 2 if len(values) == 1 else values, n=10, method="inclusive")
    assert (spread.low, spread.median, spread.high) == pytest.approx((deciles[0], deciles[4], deciles[8]))
    assert spread.n == len(values)


@pytest.mark.parametrize("n", range(6, 60))
def test_the_interval_of_the_median_is_the_narrowest_of_ordered_values_that_is_sure_enough(n: int) -> None:
    spread = Spread.of(np.random.default_rng(n).permutation(np.arange(1, n + 1)).tolist())
    rank = int(spread.median_low)  # the values are their own ranks
    assert spread.median_high == n + 1 - rank
    assert 1 - 2 * binom.cdf(rank - 1, n, 0.5) >= 0.95 > 1 - 2 * binom.cdf(rank, n, 0.5)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).lognormal(size=(4000, 15))  # its median is 1
    held = [spread.median_low <= 1 <= spread.median_high for spread in map(Spread.of, draws.tolist())]
    assert 0.95 < np.mean(held) < 0.98


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_rounds_give_all_they_have(n: int) -> None:
    spread = Spread.of([float(value) for value in range(n)])
    assert (spread.median_low, spread.median_high) == (0, n - 1)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The machine was ten times slower in the second round: the ratio does not see it, a ratio of medians would.
    laps = {"A": [Lap(2, 1), Lap(20, 10), Lap(3, 1)], "B": [Lap(1, 1), Lap(10, 5), Lap(1, 1)]}
    spread = compare(laps, "A", "B", wall_time)
    assert (spread.median, spread.n) == (2.0, 3)


def test_a_ratio_of_work_has_that_of_the_wall_beside_it() -> None:
    laps = {"A": [Lap(9, 4)], "B": [Lap(3, 2)]}
    ratio = work_ratio(laps, "A", "B", Goal("≤", 2.5), flops=1.5).to_json()
    spread = {"low": 2.0, "high": 2.0, "median_low": 2.0, "median_high": 2.0, "n": 1}
    expected = {"name": "A/B", "ratio": 2.0, **spread, "goal": "≤ 2.5", "met": True, "wall_ratio": 3, "flop_ratio": 1.5}
    assert ratio == expected


@pytest.mark.parametrize(
    ("relation", "ratio", "met"), [("≤", 1.0, True), ("≤", 1.01, False), ("≥", 1.0, True), ("≥", 0.99, False)]
)
def test_goals(relation, ratio: float, met: bool) -> None:
    entry = Result("A/B", Spread.of([ratio]), Goal(relation, 1.0), composed=True).to_json()
    assert (entry["met"], entry["composed"], entry["goal"]) == (met, True, f"{relation} 1")


def test_what_is_not_known_is_left_out() -> None:
    assert set(Result("A/B", Spread.of([1.0])).to_json()) == {
        "name",
        "ratio",
        "low",
        "high",
        "median_low",
        "median_high",
        "n",
    }


def test_a_time_has_its_unit_as_a_key() -> None:
    assert Result("forward", Spread.of([1.0, 3.0]), unit="seconds_per_image").to_json()["seconds_per_image"] == 2.0
