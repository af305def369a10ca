"""The slowest of many ranks: the simulation against ranks drawn one by one and against the closed form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.study.plan.devices import Stragglers


@pytest.mark.parametrize("ranks", [1, 2, 7, 64, 3072])
def test_the_simulated_mean_is_the_closed_form(ranks) -> None:
    stragglers = Stragglers(jitter=0.02, samples=40_000, seed=3)
    simulated = stragglers.slowest(ranks, stragglers.draws[0])
    # The maximum of n exponentials has variance 1 + 1/4 + … + 1/n²; six standard errors of the mean are allowed.
    error = 0.02 * np.sqrt(sum(1 / k**2 for k in range(1, ranks + 1)) / 40_000)
    harmonic = sum(1 / k for k in range(1, ranks + 1))
    assert simulated.mean() == pytest.approx(1 + 0.02 * harmonic, abs=6 * error)


def test_it_is_distributed_as_the_maximum_of_ranks_drawn_one_by_one() -> None:
    stragglers = Stragglers(jitter=0.1, samples=20_000, seed=5)
    ours = stragglers.slowest(24, stragglers.draws[1])
    one_by_one = 1 + 0.1 * np.random.default_rng(11).exponential(size=(20_000, 24)).max(axis=1)
    # Kolmogorov and Smirnov: two samples of n from one distribution lie further apart than 2√(2/n) once in 1500 times.
    places = np.sort(np.concatenate([ours, one_by_one]))
    below = [np.searchsorted(np.sort(sample), places, side="right") / 20_000 for sample in (ours, one_by_one)]
    assert np.abs(below[0] - below[1]).max() < 2 * np.sqrt(2 / 20_000)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(0, 100))
def test_more_ranks_are_never_faster(ranks, more, seed) -> None:
    stragglers = Stragglers(jitter=0.05, samples=16, seed=seed)
    uniform = stragglers.draws[0]
    few, many = stragglers.slowest(ranks, uniform), stragglers.slowest(ranks + more, uniform)
    assert (few >= 1).all()
    assert (many >= few).all()
    assert np.isfinite(many).all()


def test_a_seed_fixes_the_draws_and_streams_differ() -> None:
    first, again, other = (Stragglers(0.1, seed=seed).draws for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert (first[0] != first[1]).any()


def test_without_jitter_all_ranks_are_alike() -> None:
    stragglers = Stragglers(jitter=0.0)
    assert (stragglers.slowest(1000, stragglers.draws[0]) == 1).all()
