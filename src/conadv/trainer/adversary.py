"""The attacks of an evaluation: PGD that judges a model, and the attack of the run that generates twins."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from torch import Tensor, nn

from conadv.core.attack import Attack, Loss
from conadv.core.pgd import PGD, Norm
from conadv.core.seeds import untouched_randomness
from conadv.task.data import Source
from conadv.task.evaluate import Adversary


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
    autoattack: bool = False
    """AutoAttack, once, instead of PGD."""

    def attack(self) -> Adversary:
        if self.autoattack:
            return AutoAttack(self.epsilon, self.norm)
        return robust_attack(self.epsilon, self.steps, norm=self.norm)


@dataclass(frozen=True)
class AutoAttack:
    """The standard ensemble of Croce and Hein (2020), by their own code: APGD-CE, APGD-T, FAB-T and Square."""

    epsilon: float
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pyautoattack") is None:
            raise ValueError("AutoAttack is not installed: pip install 'conadv[robust]'")

    def __call__(self, model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, seed: int = 0) -> Tensor:
        """Change the images within epsilon; `loss` is not used, since each of its attacks has its own."""
        import pyautoattack

        classes = model(images[:1]).shape[1]
        if classes < 4:
            raise ValueError(f"AutoAttack needs at least 4 classes, and this model has {classes}: use PGD")
        norm = {"linf": "Linf", "l2": "L2"}[self.norm]
        with untouched_randomness(images.device, seed):
            attack = pyautoattack.AutoAttack(
                model, norm=norm, eps=self.epsilon, seed=seed % 2**31, device=images.device
            )
            attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
            changed: Tensor = attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]
        return changed


@dataclass(frozen=True)
class HeldOut:
    """Training images that are not learnt from, and how to watch their robust accuracy."""

    source: Source
    test: RobustTest


@dataclass(frozen=True)
class TwinTest:
    """How a run generates twins, and groups and routes them when it learns from them."""

    attack: Attack
    branch: str
    chunk_size: int
    shuffled: int = 1
    """The twins of this many chunks are shuffled before they are learnt."""


def robust_attack(epsilon: float, steps: int, branch: str = "main", norm: Norm = "linf") -> PGD:
    """Return PGD within `epsilon`, with a step size large enough to cross the ball and come back."""
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    return PGD(epsilon, size, steps, norm, random_start=1.0, branch=branch, statistics="running")
