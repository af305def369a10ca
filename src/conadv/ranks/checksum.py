"""A checksum of the weights in each step, to detect a rank whose weights differ in any bit.

The bits of the checksum, as numbers 0 and 1, are part of the all_reduce of the step. If all weights are equal, each bit
sums to 0 or to the number of ranks, exactly, in any dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 64
# Each step covers one of so many parts of the weights, which costs almost nothing.
TURNS = 8


class Checksum:
    """The sum of the bit patterns of the weights as integers, modulo 2 to the 64; one part of the weights per step.

    Any single bit that changes adds or subtracts a power of two, so it changes the sum.

    Args:
        weights: Tensors with the same sizes and order on every rank.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        turns = min(TURNS, len(weights))
        self._parts = [weights[turn::turns] for turn in range(turns)]
        self._turn = 0

    def next(self) -> Tensor:
        """Return the checksum of the next part of the weights, as 64 numbers 0 or 1."""
        part = self._parts[self._turn % len(self._parts)]
        self._turn += 1
        total = torch.stack([_patterns(weight.detach()).sum() for weight in part]).sum()
        return (total >> torch.arange(BITS, device=total.device)) & 1


def odd_ones(rows: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the indices of the rows that differ from the most frequent one; in a tie, the first row counts."""
    counts = Counter(map(tuple, rows))
    usual = max(counts, key=lambda row: (counts[row], row == tuple(rows[0])))
    return tuple(place for place, row in enumerate(rows) if tuple(row) != usual)


def _patterns(weight: Tensor) -> Tensor:
    """View a tensor as integers, of eight bytes if its size allows it; copies only tensors that are not dense."""
    weight = torch.view_as_real(weight) if weight.is_complex() else weight
    dense = weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last))
    flat = weight.as_strided((weight.numel(),), (1,)) if dense else weight.flatten()
    per_word = 8 // flat.element_size()
    if len(flat) % per_word == 0 and flat.storage_offset() % per_word == 0:
        return flat.view(torch.int64)
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[flat.element_size()]).to(torch.int64)
