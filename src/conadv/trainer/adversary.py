"""The attacks of an evaluation: PGD that judges a model, and the attack of the run that generates twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conadv.core.attack import Attack
from conadv.core.pgd import PGD, Norm
from conadv.task.data import Source


@dataclass(frozen=True)
class RobustTest:
    """How to measure robust accuracy: the share of images that stay correctly classified under every attack."""

    epsilon: float
    norm: Norm = "linf"
    steps: int = 20
    """Steps of PGD."""
    restarts: int = 2
    """How often PGD starts, at another random point each time."""
    images: int | None = None
    """How many images to attack, a fixed sample; None: all."""

    def attacks(self) -> Sequence[Attack]:
        return [robust_attack(self.epsilon, self.steps, norm=self.norm)]


@dataclass(frozen=True)
class HeldOut:
    """Training images that are not learnt from, and how to watch their robust accuracy."""

    source: Source
    test: RobustTest


@dataclass(frozen=True)
class Twins:
    """How a run generates twins, and groups and routes them when it learns from them."""

    attack: Attack
    branch: str
    chunk_size: int


def robust_attack(epsilon: float, steps: int, branch: str = "main", norm: Norm = "linf") -> PGD:
    """Return PGD within `epsilon`, with a step size large enough to cross the ball and come back."""
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    return PGD(epsilon, size, steps, norm, random_start=1.0, branch=branch, statistics="running")
