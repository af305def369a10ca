"""A checksum of the weights in each step, exact to the bit, so that a rank whose weights differ is named.

Every rank adds the bits of its checksum to the sum of the step, as numbers 0 and 1. Where all weights are equal, each
bit sums to 0 or to the number of ranks, exactly, in any type of number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 64
# In how many steps all weights are looked at once; a part of them in each costs next to nothing.
TURNS = 8


class Checksum:
    """The sum of the bit patterns of some weights as whole numbers, others in each step.

    Any single bit that changes changes the sum, since it adds or takes a power of two, modulo 2 to the 64.

    Args:
        weights: Tensors of the same sizes and order on every rank.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        turns = min(TURNS, len(weights))
        self._parts = [weights[turn::turns] for turn in range(turns)]
        self._turn = 0

    def next(self) -> Tensor:
        """The bits (64 numbers, 0 or 1) of the checksum of the weights whose turn it is."""
        part = self._parts[self._turn % len(self._parts)]
        self._turn += 1
        total = torch.stack([_patterns(weight.detach()).sum() for weight in part]).sum()
        return (total >> torch.arange(BITS, device=total.device)) & 1


def odd_ones(rows: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The places of the rows that are not what most are; where no value has most, those that are not the first."""
    counts = Counter(map(tuple, rows))
    usual = max(counts, key=lambda row: (counts[row], row == tuple(rows[0])))
    return tuple(place for place, row in enumerate(rows) if tuple(row) != usual)


def _patterns(weight: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers, of eight bytes where they fill them, without a copy if it is dense."""
    weight = torch.view_as_real(weight) if weight.is_complex() else weight
    dense = weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last))
    flat = weight.as_strided((weight.numel(),), (1,)) if dense else weight.flatten()
    per_word = 8 // flat.element_size()
    if len(flat) % per_word == 0 and flat.storage_offset() % per_word == 0:
        return flat.view(torch.int64)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[flat.element_size()]).to(torch.int64)
