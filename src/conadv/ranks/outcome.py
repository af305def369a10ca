"""The outcome of a step, the same on all ranks, and how it is sent to ranks that may lag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# What may not be finite, in the order in which it is checked.
CULPRITS = ("loss", "gradient", "statistics of a BatchNorm layer")


class NotFiniteError(FloatingPointError):
    """A number is not finite, and the run cannot continue; all ranks raise it in the same step."""


class DriftError(ArithmeticError):
    """Some ranks have other weights than the rest; all ranks raise it in the same step."""


class OwnDriftError(ArithmeticError):
    """This rank, which may lag, has other weights than the rest; only this rank raises it."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step, the same on all ranks."""

    clean_loss: float
    adv_loss: float
    culprits: dict[int, str] | None
    """What is not finite, by rank; empty if only the sum over the ranks is not finite. None: everything is finite."""
    stop: int
    """The number of the signal that asked some rank to stop; 0: none."""
    drifted: tuple[int, ...] = ()
    """The ranks whose weights differ from those of the others."""
    known_to_all: bool = True
    """Whether all ranks have this outcome. Only a rank that may lag has another one, if its weights have drifted."""
    save: bool = False
    """Whether some rank requested a checkpoint."""


@dataclass(frozen=True)
class Unread:
    """The outcome of a step that is still on the device."""

    finite: Tensor
    """Whether every number of the step is finite: a bool scalar on the device."""
    losses: Tensor
    """The clean and the adversarial loss over all ranks, on the device."""
    read: Callable[[], Outcome]
    """Wait for the numbers. Every rank must call it once, in the same order relative to its other communication."""


def named_culprits(table: Tensor) -> dict[int, str]:
    """Return the first of `CULPRITS` that is not finite, by rank, from a bool table (ranks, `CULPRITS`)."""
    return {
        rank: next(name for name, bad in zip(CULPRITS, row, strict=True) if bad)
        for rank, row in enumerate(table.tolist())
        if any(row)
    }


@dataclass(frozen=True)
class Report:
    """Converts an outcome to a tensor and back, without losses and `save`, which ranks that may lag already have.

    Args:
        ranks: the number of ranks.
    """

    ranks: int

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return 2 + self.ranks * (len(CULPRITS) + 1)

    def pack(self, outcome: Outcome, like: Tensor) -> Tensor:
        """Convert an outcome to a tensor with the dtype and device of `like`."""
        culprits = torch.zeros(self.ranks, len(CULPRITS))
        for rank, name in (outcome.culprits or {}).items():
            culprits[rank, CULPRITS.index(name)] = 1
        drifted = torch.zeros(self.ranks)
        drifted[list(outcome.drifted)] = 1
        head = torch.tensor([float(outcome.culprits is not None), float(outcome.stop)])
        return torch.cat([head, culprits.flatten(), drifted]).to(like)

    def unpack(self, numbers: Tensor, clean_loss: float, adv_loss: float, save: bool) -> Outcome:
        """Restore an outcome from what `pack` returned, and from its losses and `save`."""
        head, culprits, drifted = numbers.cpu().split([2, self.ranks * len(CULPRITS), self.ranks])
        found = named_culprits(culprits.view(self.ranks, -1) > 0) if head[0] else None
        odd = tuple(drifted.nonzero().flatten().tolist())
        return Outcome(clean_loss, adv_loss, found, int(head[1]), odd, save=save)
