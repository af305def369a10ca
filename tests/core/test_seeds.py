"""Seeds for every purpose, and generators that nobody else notices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv.core.seeds import mix, untouched_randomness

whole = st.integers(-(2**63), 2**64 - 1)


def splitmix64(seed: int) -> int:
    """The first output of Vigna's generator for a seed, from its publication."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_it_is_splitmix64() -> None:
    # The first number that the reference implementation prints for seed 1234567.
    assert mix(1234567) == splitmix64(1234567) == 6457827717110365317


@given(st.lists(whole, min_size=1, max_size=5))
def test_a_seed_fits_a_generator(parts: list[int]) -> None:
    seed = mix(*parts)
    assert 0 <= seed < 2**64 and seed == mix(*parts)
    torch.Generator().manual_seed(seed)


def test_near_numbers_give_different_seeds_in_every_place() -> None:
    seeds = {mix(*parts) for parts in itertools.product(range(12), repeat=3)}
    assert len(seeds) == 12**3
    assert mix(1, 2) != mix(2, 1) and mix(1) != mix(1, 0)


@pytest.mark.parametrize("seed", [None, 5])
def test_generators_are_found_as_they_were(seed: int | None) -> None:
    device = torch.device("cpu")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with untouched_randomness(device, seed):
        within = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    assert torch.initial_seed() == 3
    assert torch.equal(within, torch.rand(2, generator=torch.Generator().manual_seed(3 if seed is None else seed)))
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), untouched_randomness(device, seed):
        torch.rand(1 // 0)
    assert torch.equal(torch.rand(2), expected)
