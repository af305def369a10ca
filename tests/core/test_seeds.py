"""Seeds for every purpose, and generators that nobody else notices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv.core.seeds import BRANCH_NUMBER, centered, mix, normal, random_bits, uniform, untouched_randomness

whole = st.integers(-(2**63), 2**64 - 1)


def published(seed: int) -> Iterator[int]:
    """Vigna's generator as published, in plain Python."""
    mask = (1 << 64) - 1
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


def test_it_is_splitmix64() -> None:
    # The first number that the reference implementation prints for seed 1234567.
    assert mix(1234567) == next(published(1234567)) == 6457827717110365317


@given(st.lists(whole, min_size=1, max_size=5))
def test_a_seed_fits_a_generator(parts: list[int]) -> None:
    seed = mix(*parts)
    assert 0 <= seed < 2**64 and seed == mix(*parts)
    torch.Generator().manual_seed(seed)


def test_near_numbers_give_different_seeds_in_every_place() -> None:
    seeds = {mix(*parts) for parts in itertools.product(range(12), repeat=3)}
    assert len(seeds) == 12**3
    assert mix(1, 2) != mix(2, 1) and mix(1) != mix(1, 0)
    assert sorted(BRANCH_NUMBER.values()) == [0, 1, 2]


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


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("count", [1, 3, 4, 17])
def test_random_bits_are_those_of_the_published_generator(seed: int, count: int) -> None:
    words = list(itertools.islice(published(seed), -(-count // 4)))
    expected = [(word >> shift) & 0xFFFF for word in words for shift in (0, 16, 32, 48)][:count]
    assert [value & 0xFFFF for value in random_bits(count, seed, torch.device("cpu")).tolist()] == expected


def test_random_numbers_are_spread_evenly() -> None:
    like = torch.zeros((), dtype=torch.float64)
    numbers = centered((400, 500), 7, like)
    assert numbers.abs().max() < 1 and abs(float(numbers.mean())) < 0.005
    assert float(numbers.square().mean()) == pytest.approx(1 / 3, abs=0.005)
    shares = torch.histc(uniform((400, 500), 8, like), bins=10, min=0, max=1) / 200_000
    assert torch.allclose(shares, torch.full_like(shares, 0.1), atol=0.005)
    neighbours = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))[0, 1]
    seeds = torch.corrcoef(torch.stack([numbers.flatten(), centered((400, 500), 8, like).flatten()]))[0, 1]
    assert abs(float(neighbours)) < 0.01 and abs(float(seeds)) < 0.01
    draws = normal((400, 500), 9, like)
    assert abs(float(draws.mean())) < 0.01 and float(draws.std()) == pytest.approx(1, abs=0.01)
    assert float((draws.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_random_numbers_are_the_same_in_every_precision(dtype: torch.dtype) -> None:
    exact = centered((100,), 3, torch.zeros((), dtype=torch.float64))
    assert torch.equal(centered((100,), 3, torch.zeros((), dtype=dtype)), exact.to(dtype))
