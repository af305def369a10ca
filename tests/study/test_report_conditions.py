"""Means, spreads and intervals, against numpy and scipy, and the settings that tell conditions apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from conadv import config
from conadv.study.report.conditions import Spread, effective, number, spread


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=60))
def test_mean_deviation_and_interval(figures: list[float]) -> None:
    of = spread(figures)
    assert of is not None and of.deviation is not None and of.interval is not None
    assert of.mean == pytest.approx(np.mean(figures), abs=1e-9)
    assert of.deviation == pytest.approx(np.std(figures, ddof=1), abs=1e-9)
    assert of.n == len(figures)
    half = scipy.stats.t.ppf(0.975, len(figures) - 1) * np.std(figures, ddof=1) / np.sqrt(len(figures))
    # Beyond 30 degrees of freedom the normal value stands in, 2 to 4 % below.
    assert of.interval[1] - of.mean == pytest.approx(half, rel=1e-3 if len(figures) <= 31 else 0.045, abs=1e-9)
    assert of.interval[0] + of.interval[1] == pytest.approx(2 * of.mean, abs=1e-9)


def test_one_figure_has_no_spread() -> None:
    of = spread([37.14])
    assert of == Spread(37.14, None, 1)
    assert (of.text(), of.interval, of.interval_text()) == ("37.1", None, "–")


def test_figures_that_are_missing_do_not_count() -> None:
    assert spread([None, 1.0, None, 3.0]) == Spread(2.0, 2**0.5, 2)
    assert spread([None]) is None
    assert spread([]) is None


@pytest.mark.parametrize(
    ("value", "digits", "signed", "text"),
    [
        (1.25, 1, False, "1.2"),
        (-1.26, 1, False, "−1.3"),
        (-0.04, 1, True, "0.0"),
        (0.04, 1, True, "0.0"),
        (0.06, 1, True, "+0.1"),
        (1234.5, 0, False, "1234"),
    ],
)
def test_numbers_are_written_with_a_true_minus_and_no_minus_zero(
    value: float, digits: int, signed: bool, text: str
) -> None:
    assert number(value, digits, signed) == text


def test_texts() -> None:
    of = Spread(4.18, 0.51, 3)
    assert of.text() == "4.2 ± 0.5"
    assert of.text(2, signed=True) == "+4.18 ± 0.51"
    assert of.interval_text() == "+2.9 to +5.4"  # 4.303 × 0.51 / √3 = 1.267


@pytest.mark.parametrize(
    ("method", "key", "values"),
    [
        ("vanilla", "twin_share", ["1/4", "1/2", 1]),
        ("vanilla", "twin_branch", ["adv", "main"]),
        ("vanilla", "adv_weight", [0.25, 0.5]),
        ("recycled", "rho", [0.05, 0.1]),
        ("conadv", "rho", [0.05, 0.1]),
        ("sam", "attack.epsilon", ["4/255", "8/255"]),
        ("sam", "twin_share", ["1/4", 1]),
    ],
)
def test_settings_that_a_method_does_not_take_make_no_conditions(method: str, key: str, values: list[Any]) -> None:
    recipes = [config.load_recipe("digits", {"method": method, key: str(value)}) for value in values]
    assert len({tuple(effective(config.flatten(recipe)).items()) for recipe in recipes}) == 1


@pytest.mark.parametrize(
    ("method", "key", "values"),
    [("recycled", "twin_share", ["1/4", 1]), ("sam", "rho", [0.05, 0.1]), ("sam", "delay", [0, 1])],
)
def test_settings_that_a_method_takes_make_conditions(method: str, key: str, values: list[Any]) -> None:
    recipes = [config.load_recipe("digits", {"method": method, key: str(value)}) for value in values]
    assert len({tuple(effective(config.flatten(recipe)).items()) for recipe in recipes}) == len(values)
