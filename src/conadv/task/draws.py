"""Random numbers as functions of integers, for many images at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Seeds = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
# A constant, not a user's seed: the split of a data set is the same in every run.
_SPLIT = 1797


def mix_all(*parts: int | NDArray[np.integer]) -> Seeds:
    """`core.seeds.mix` for arrays: parts are integers or arrays that broadcast. Returns one seed per element."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        whole = np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64) if isinstance(part, int) else part.astype(np.uint64)
        state = _scramble(state + whole + np.uint64(_GOLDEN))
    return state


def uniforms(seeds: Seeds, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers in [0, 1) for each seed, (N, count)."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_scramble(seeds[:, None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(length: int, *parts: int) -> NDArray[np.int64]:
    """A permutation of 0 to length - 1, as a function of the parts: no library's generator is involved."""
    return np.argsort(mix_all(*parts, np.arange(length)), kind="stable")


def stratified(labels: NDArray[np.int64], classes: int, size: int) -> NDArray[np.bool_]:
    """A mask of `size` images, taken from the classes in turn."""
    shuffled = permutation(len(labels), _SPLIT)
    turns = np.empty(len(labels), np.int64)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels, minlength=classes)
    turns[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), np.bool_)
    mask[np.lexsort((labels, turns))[:size]] = True
    return mask


def _scramble(state: Seeds) -> Seeds:
    """The finalizer of splitmix64, which relies on unsigned overflow."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
