"""What all ranks know of a step, and how it is sent to a rank that had no part in finding it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What may not be finite, in the order in which it is looked at.
CULPRITS = ("loss", "gradient", "statistics of a BatchNorm layer")


class NotFiniteError(FloatingPointError):
    """A run that cannot continue, and what to try; all ranks raise it."""


class DriftError(ArithmeticError):
    """A rank whose weights are not those of the others; all ranks know of it."""


class OwnDriftError(ArithmeticError):
    """The weights of this rank are not those of the others, which only it knows."""


@dataclass(frozen=True)
class Outcome:
    """What all ranks know of a step, the same on each of them."""

    clean_loss: float
    adv_loss: float
    culprits: dict[int, str] | None
    """None: every number is finite. Else the ranks with others, and what was not: empty where only their sum is not."""
    stop: int
    """The signal that asked some rank to stop; 0: none did."""
    drifted: tuple[int, ...] = ()
    """The ranks whose weights are not those of the others."""
    known_to_all: bool = True
    """Whether every rank has the same outcome; not where a rank that only attacks, and may lag, has drifted."""
    save: bool = False
    """Whether some rank asked for a checkpoint."""


@dataclass(frozen=True)
class Unread:
    """The outcome of a step while it is still on the device."""

    finite: Tensor
    """Whether every number of the step is finite: bool, without dimensions, on the device."""
    losses: Tensor
    """The clean and the adversarial loss over all ranks, on the device."""
    read: Callable[[], Outcome]
    """Waits for the numbers. Every rank must call it once, at the same place among its exchanges."""


def named_culprits(table: Tensor) -> dict[int, str]:
    """What was not finite first, by rank, from a table (ranks, `CULPRITS`) of what was not."""
    return {
        rank: next(name for name, bad in zip(CULPRITS, row, strict=True) if bad)
        for rank, row in enumerate(table.tolist())
        if any(row)
    }


@dataclass(frozen=True)
class Report:
    """An outcome as numbers, without what is in the sum over the ranks: losses, and requests for a checkpoint.

    Args:
        ranks: how many there are.
    """

    ranks: int

    @property
    def size(self) -> int:
        """How many numbers."""
        return 2 + self.ranks * (len(CULPRITS) + 1)

    def pack(self, outcome: Outcome, like: Tensor) -> Tensor:
        """The numbers, of the dtype and on the device of `like`."""
        culprits = torch.zeros(self.ranks, len(CULPRITS))
        for rank, name in (outcome.culprits or {}).items():
            culprits[rank, CULPRITS.index(name)] = 1
        drifted = torch.zeros(self.ranks)
        drifted[list(outcome.drifted)] = 1
        head = torch.tensor([float(outcome.culprits is not None), float(outcome.stop)])
        return torch.cat([head, culprits.flatten(), drifted]).to(like)

    def unpack(self, numbers: Tensor, clean_loss: float, adv_loss: float, save: bool) -> Outcome:
        """The outcome that was packed, with the losses of the step, and whether it asks for a checkpoint."""
        head, culprits, drifted = numbers.cpu().split([2, self.ranks * len(CULPRITS), self.ranks])
        found = named_culprits(culprits.view(self.ranks, -1) > 0) if head[0] else None
        odd = tuple(drifted.nonzero().flatten().tolist())
        return Outcome(clean_loss, adv_loss, found, int(head[1]), odd, save=save)
