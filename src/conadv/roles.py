"""Roles: the duties of one process, and its place among those that take a step together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto


class Role(Flag):
    """The duties of one process: learn from clean images, learn from twins, generate twins."""

    CLEAN = auto()
    ADV = auto()
    ATTACK = auto()


@dataclass(frozen=True)
class Place:
    """The place of one process among those that take a step together; by default it does everything itself.

    Args:
        role: what the process does.
        total: how many chunks the global batch has; None: those that come. Each weighs the same on every process, and
            the gradient is the sum over all of them.
        averaged: over how many processes gradients are averaged afterwards; the loss is multiplied by it first.
        first_chunk: the number, within the global batch, of the first chunk that it sees.
        chunks: how many chunks of a batch it sees in a layout; None: it is no rank of a layout.
    """

    role: Role = Role.CLEAN | Role.ADV | Role.ATTACK
    total: int | None = None
    averaged: int = 1
    first_chunk: int = 0
    chunks: int | None = None
