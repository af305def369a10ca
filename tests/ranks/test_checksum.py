"""A checksum of the weights that any changed bit changes, and who differs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv.ranks.checksum import BITS, Checksum, odd_ones
from support import tasks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8]


def number(bits: torch.Tensor) -> int:
    return sum(int(bit) << place for place, bit in enumerate(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.integers(1, 40), st.data())
def test_any_changed_bit_changes_the_checksum(dtype, length, data):
    weight = torch.randint(-99, 99, (length,)).to(dtype)
    before = Checksum([weight]).next()
    assert before.shape == (BITS,)
    place = data.draw(st.integers(0, length * weight.element_size() - 1))
    weight.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert not torch.equal(Checksum([weight]).next(), before)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9))
def test_it_is_the_sum_of_the_bit_patterns(words):
    weight = torch.tensor(words).view(torch.float64)
    assert number(Checksum([weight]).next()) == sum(words) % 2**64


def test_the_order_in_memory_is_taken_as_it_is():
    weight = torch.rand(4, 3, 5, 5)
    turned = weight.to(memory_format=torch.channels_last)
    assert torch.equal(Checksum([weight.int()]).next(), Checksum([turned.int()]).next())  # a sum has no order
    assert Checksum([turned[:, ::2]]).next().shape == (BITS,)


def test_every_weight_has_its_turn_in_eight_steps():
    weights = [torch.rand(3) for _ in range(20)]
    for changed in weights:
        one, other = Checksum(weights), Checksum([weight.clone() for weight in weights])
        changed += 1
        assert [bool((one.next() != other.next()).any()) for _ in range(8)].count(True) == 1


@pytest.mark.parametrize(
    ("rows", "odd"),
    [("aaa", ()), ("aba", (1,)), ("baa", (0,)), ("ab", (1,)), ("aabb", (2, 3)), ("abc", (1, 2)), ("abbbc", (0, 4))],
)
def test_who_differs_from_most_or_else_from_the_first(rows, odd):
    assert odd_ones([[float(ord(row))] for row in rows]) == odd


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_bit_changed_on_one_rank_is_known_to_all(odd, pool):
    assert pool.run(3, tasks.exchange_after_drift, odd) == [[(), (odd,)]] * 3


def test_weights_become_those_of_rank_0(pool):
    first, *others = pool.run(3, tasks.share_weights)
    assert others == [first] * 2
