"""Our attack against foolbox's, and a step of DisAdv against one written with foolbox.

    python benchmarks/attack.py --json

Foolbox computes gradients of the images and of the weights, ours of the images alone. Called as its manual says, it
also checks whether the attack succeeded, which is one more forward pass.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import nn

from conadv.core.batch import Chunk
from conadv.study.bench.alternate import Tell, alternate
from conadv.study.bench.command import Measurement
from conadv.study.bench.result import Findings, Goal, work_ratio
from conadv.study.bench.step import Step, method_step, sgd
from conadv.study.bench.workload import EPSILON, Workload, attack
from libraries import absence, load
from scripts import run_workload


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Time of foolbox divided by ours, on the same network and batch."""
    foolbox = load("foolbox")
    if foolbox is None:
        return Findings([], notes=[absence("foolbox")])
    runs = {
        **attacks(foolbox, workload.build().eval(), workload.pixels()),
        "disadv": method_step(workload, "disadv"),
        "naive": naive_step(foolbox, workload.build(), workload.pixels()),
    }
    laps = alternate(runs, rounds, tell=tell)
    return Findings(
        [
            work_ratio(laps, "foolbox-unchecked", "pgd", Goal("≥", 1.3)),
            work_ratio(laps, "foolbox", "pgd"),
            work_ratio(laps, "naive", "disadv"),
        ],
        notes=[
            "foolbox-unchecked: its attack alone; foolbox: as its manual calls it, which checks whether it succeeded",
            "naive: clean and adversarial training from foolbox and a plain loop",
        ],
    )


def attacks(foolbox: ModuleType, model: nn.Module, batch: Chunk) -> dict[str, Step]:
    """The same step from the same images by both, with running statistics, as foolbox needs."""
    images, labels = batch
    ours = replace(attack(), branch="main", statistics="running")
    theirs = _linf_pgd(foolbox)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    return {
        "foolbox-unchecked": lambda: theirs.run(wrapped, images, labels, epsilon=EPSILON),
        "pgd": lambda: ours(model, F.cross_entropy, images, labels),
        "foolbox": lambda: theirs(wrapped, images, labels, epsilons=EPSILON),
    }


def naive_step(foolbox: ModuleType, model: nn.Module, batch: Chunk) -> Step:
    """The step without this library: attack in eval mode, drop its gradients, learn from both."""
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


if __name__ == "__main__":
    run_workload("attack", Measurement(measure, Workload(), 15), __doc__)
