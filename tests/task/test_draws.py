"""The vectorised random numbers are those of `core.seeds`, and spread evenly."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conadv.core.seeds import mix
from conadv.task.draws import mix_all, permutation, stratified, uniforms

numbers = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(numbers, min_size=1, max_size=4), st.lists(numbers, min_size=1, max_size=5))
def test_arrays_are_mixed_as_numbers_are(first: list[int], last: list[int]) -> None:
    expected = [mix(*first, number) for number in last]
    assert mix_all(*first, np.array(last)).tolist() == expected


@given(numbers, st.integers(0, 50))
def test_a_permutation_has_every_index_once(seed: int, length: int) -> None:
    assert sorted(permutation(length, seed).tolist()) == list(range(length))


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(mix_all(3, np.arange(20_000)), 4)
    assert draws.shape == (20_000, 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.stack([np.histogram(column, bins=20, range=(0, 1))[0] for column in draws.T])
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)
    assert np.abs(np.corrcoef(draws.T) - np.eye(4)).max() < 5 / np.sqrt(20_000)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_a_stratified_part_takes_from_all_classes_alike(labels: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(labels)))
    mask = stratified(np.array(labels), 5, size)
    taken, there = (np.bincount(np.array(part, dtype=int), minlength=5) for part in (np.array(labels)[mask], labels))
    assert mask.sum() == size
    for short in range(5):  # a class may have fewer than another only by one, or when it has no more to give
        assert taken[short] == there[short] or taken[short] >= taken.max() - 1
