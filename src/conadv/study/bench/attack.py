"""What an attack costs against foolbox, and a step of DisAdv against one put together by hand from foolbox.

Foolbox walks back to the images and, on the way, to the weights; ours to the images alone. Called as its manual says,
it then also looks whether the attack succeeded, which is one more forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import nn

from conadv.core.batch import Chunk

from .alternate import Tell, alternate
from .extra import absence, load
from .result import Findings, Goal, work_ratio
from .step import Step, method_step, sgd
from .workload import EPSILON, Workload, attack

ROUNDS = 15


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """How many times the time of ours foolbox takes, on the same network and batch."""
    foolbox = load("foolbox")
    if foolbox is None:
        return Findings([], heartbeats=[absence("foolbox")])
    runs = {
        **_attacks(foolbox, workload.build().eval(), workload.pixels()),
        "disadv": method_step(workload, "disadv"),
        "naive": _naive_step(foolbox, workload.build(), workload.pixels()),
    }
    laps = alternate(runs, rounds, tell=tell)
    return Findings(
        [
            work_ratio(laps, "foolbox-unchecked", "pgd", Goal("≥", 1.3)),
            work_ratio(laps, "foolbox", "pgd"),
            work_ratio(laps, "naive", "disadv"),
        ],
        heartbeats=[
            "foolbox-unchecked: its attack alone; foolbox: as its manual calls it, which looks whether it succeeded",
            "naive: clean and adversarial training from foolbox and a plain loop",
        ],
    )


def _attacks(foolbox: ModuleType, model: nn.Module, batch: Chunk) -> dict[str, Step]:
    """The same step from the same images by both, through running statistics, as foolbox asks for."""
    images, labels = batch
    ours = replace(attack(), branch="main", statistics="running")
    theirs = _linf_pgd(foolbox)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    return {
        "foolbox-unchecked": lambda: theirs.run(wrapped, images, labels, epsilon=EPSILON),
        "pgd": lambda: ours(model, F.cross_entropy, images, labels),
        "foolbox": lambda: theirs(wrapped, images, labels, epsilons=EPSILON),
    }


def _naive_step(foolbox: ModuleType, model: nn.Module, batch: Chunk) -> Step:
    """What one writes without this library: attack in eval mode, forget its gradients, learn from both."""
    images, labels = batch
    optimizer, theirs = sgd(model), _linf_pgd(foolbox)

    def step() -> None:
        model.eval()
        _, twins, _ = theirs(foolbox.PyTorchModel(model, bounds=(0, 1)), images, labels, epsilons=EPSILON)
        model.train()
        optimizer.zero_grad()
        loss = 0.5 * F.cross_entropy(model(images), labels) + 0.5 * F.cross_entropy(model(twins), labels)
        loss.backward()
        optimizer.step()

    return step


def _linf_pgd(foolbox: ModuleType) -> Any:
    return foolbox.attacks.LinfPGD(abs_stepsize=EPSILON, steps=1, random_start=False)
