"""Everything random is a function of (seed, what it is for): never of the rank, the time or what ran before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """One 64-bit seed from several whole numbers (splitmix64 over each): near inputs give unrelated seeds."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@contextmanager
def untouched_randomness(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leave PyTorch's global generators as they were found; within, start them from `seed` if it is given."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if seed is not None:
            # Not torch.manual_seed, which reaches every device, also those that are not put back.
            torch.default_generator.manual_seed(seed)
            if devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        yield
