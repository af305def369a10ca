"""Everything random is a function of (seed, what it is for, step, chunk), never of the device or what ran before.

seeds     mix(seed, purpose, step, chunk) ──► one 64-bit number
pixels    random_bits(that number) ──► 16 bits per pixel by integer arithmetic, the same on every device
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
# splitmix64: the distance between two states, then (shift, multiplier) of each round.
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# What a random number is for, so that different purposes have different seeds: of a method, mix(seed, purpose, ...),
ATTACK, PASS, CHOICE_OF_TWINS, ORDER_OF_TWINS = 1, 2, 3, 4
# and of an attack, mix(seed of the attack, purpose, ...).
START, MOVED, TARGET, NOISE, ATTACK_PASS = 1, 2, 3, 4, 5
BRANCH_NUMBER = {"main": 0, "aug": 1, "adv": 2}


def mix(*parts: int) -> int:
    """One 64-bit seed from several whole numbers (splitmix64 over each): near inputs give unrelated seeds."""
    state = 0
    for part in parts:
        state = (state + part + _STEP) & _MASK
        for shift, multiplier in _ROUNDS:
            state = ((state ^ (state >> shift)) * multiplier) & _MASK
        state ^= state >> _LAST_SHIFT
    return state


def random_bits(count: int, seed: int, device: torch.device) -> Tensor:
    """16 random bits per number, as int16: the outputs of splitmix64 from `seed` on, each of which gives four numbers.

    Integer arithmetic only, so that the numbers are the same on every device.
    """
    words = torch.arange(1, -(-count // 4) + 1, device=device)
    words.mul_(_signed(_STEP)).add_(_signed(seed))
    for shift, multiplier in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(multiplier))
    words.bitwise_xor_(_shifted(words, _LAST_SHIFT))
    return words.view(torch.int16)[:count]


def centered(shape: Sequence[int], seed: int, like: Tensor) -> Tensor:
    """Random numbers over (-1, 1), in steps of 2**-15 that the dtype of `like` may round, on its device."""
    bits = random_bits(math.prod(shape), seed, like.device).view(tuple(shape))
    return bits.to(torch.promote_types(like.dtype, torch.float32)).add_(0.5).mul_(2**-15).to(like.dtype)


def uniform(shape: Sequence[int], seed: int, like: Tensor) -> Tensor:
    """Random numbers evenly spread over (0, 1), in steps of 2**-16, on the device of `like`.

    In its dtype, or in float32 where that has 16 bits: there, the smallest and the largest would be 0 and 1.
    """
    wide = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
    return centered(shape, seed, wide).add_(1).mul_(0.5)


def normal(shape: Sequence[int], seed: int, like: Tensor) -> Tensor:
    """Normally distributed numbers (Box-Muller), on the device of `like` and in the dtype of `uniform`."""
    radius = uniform(shape, mix(seed, 1), like).log_().mul_(-2).sqrt_()
    return radius.mul_(centered(shape, mix(seed, 2), radius).mul_(math.pi).cos_())


@contextmanager
def untouched_randomness(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Restore PyTorch's global generators after this context; within it they start from `seed`, if given."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        if seed is not None:
            # Not torch.manual_seed, which seeds every device, also those that are not restored here.
            torch.default_generator.manual_seed(seed)
            if devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
        yield


def _signed(number: int) -> int:
    """Reinterpret the 64 bits of a number as a signed int64."""
    number &= _MASK
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(words: Tensor, shift: int) -> Tensor:
    """A logical shift to the right; PyTorch's own keeps the sign."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
