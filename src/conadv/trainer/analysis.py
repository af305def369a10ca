"""`conadv analyze`: measure sharpness and robust accuracy of a trained network for each BatchNorm branch.

Each result is written to analysis.json when it is done, so that an analysis that was stopped continues with the next.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conadv.core.attack import Attack
from conadv.core.batch import to_pixels
from conadv.core.batchnorm.branches import split_layers
from conadv.core.batchnorm.splitbn import routed
from conadv.core.seeds import mix
from conadv.task.data import Source, evaluation_batches
from conadv.task.evaluate import evaluate
from conadv.task.models import evaluating
from conadv.task.sharpness import Surface, largest_eigenvalues, random_start, trace, worst_value

from .adversary import robust_attack
from .build_task import Task
from .files import read_text, write_atomically
from .progress import ProgressBar

FILE = "analysis.json"
_ASCENT = 5  # steps of gradient ascent to the worst loss in the ball, from each start
_TOLERANCE = 1e-3  # of Lanczos

Part = dict[str, Any]


@dataclass(frozen=True)
class Analysis:
    """What to measure, and how precisely."""

    images: int = 512
    """How many training images and test images to use, evenly spaced."""
    eigenvalues: int = 5
    """How many of the largest eigenvalues of the Hessian to compute."""
    iterations: int = 60
    """Largest number of Lanczos iterations."""
    probes: int = 20
    """Random vectors of Hutchinson's estimate of the trace."""
    rho: float = 0.05
    """L2 radius of the ball around the weights in which the worst loss is searched."""
    epsilon: float = 4 / 255
    """Radius of the attack on test images."""
    steps: int = 10
    """Steps of that attack."""

    def __post_init__(self) -> None:
        for name in ("images", "eigenvalues", "iterations", "probes", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: take at least 1")
        if self.iterations < self.eigenvalues:
            raise ValueError(f"--iterations {self.iterations}: take at least the {self.eigenvalues} of --eigenvalues")
        if not 0 < self.rho < math.inf:
            raise ValueError(f"--rho {self.rho}: a length above 0, such as 0.05")

    @property
    def kinds(self) -> dict[str, Part]:
        """The settings that each kind of result depends on."""
        settings = asdict(self)
        attack = {name: settings.pop(name) for name in ("epsilon", "steps")}
        return {"sharpness": settings, "accuracy": {"images": self.images, **attack}}


def analyze(
    task: Task,
    twins: Callable[[str], Attack],
    chunk_size: int,
    path: Path,
    about: Part,
    wanted: Analysis,
    again: bool,
    quiet: bool,
) -> Part:
    """Measure what the file does not contain yet, and return all results by name.

    Args:
        task: the network with the weights to analyze, its loss and its data.
        twins: returns the attack of the run through a branch, to generate what the adversarial branch was trained on.
        chunk_size: images per forward pass.
        path: analysis.json in the folder of the run.
        about: identifies the weights and the data; results of others are measured again.
        wanted: what to measure.
        again: measure everything again.
        quiet: print no progress.
    """
    found = {} if again else _read(path, about)
    parts: dict[str, Part] = {}
    names = next((layer.branches for layer in split_layers(task.model)), ("main",))
    todo = [(branch, kind) for branch in names for kind in wanted.kinds]
    products = len(names) * (wanted.iterations + wanted.probes + 2)
    with ProgressBar(0, products, quiet) as bar, evaluating(task.model):
        work = _Work(task, twins, chunk_size, wanted, bar, products)
        for branch, kind in todo:
            name, settings = f"{branch}.{kind}", wanted.kinds[kind]
            known = found.get(name, {})
            if known.get("settings") != settings:
                with routed(task.model, branch, statistics="running", tracking="off"):
                    known = {"settings": settings, **(work.sharpness if kind == "sharpness" else work.accuracy)(branch)}
            parts[name] = known
            kept = {**found, **parts}
            write_atomically(path, json.dumps({"about": about, "parts": kept}, indent=1) + "\n")
    measured = {name: {key: value for key, value in part.items() if key != "settings"} for name, part in parts.items()}
    return {f"{name}.{key}": value for name, part in measured.items() for key, value in part.items()}


def _read(path: Path, about: Part) -> dict[str, Part]:
    """Read the results in a file; empty if they are of other weights or other data."""
    try:
        content = json.loads(read_text(path))
        parts = content["parts"] if content["about"] == about else {}
        return {str(name): dict(part) for name, part in parts.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: remove it, or add --again") from None


class _Work:
    """The measurements of an analysis. The caller routes the model through the branch."""

    def __init__(
        self,
        task: Task,
        twins: Callable[[str], Attack],
        chunk_size: int,
        wanted: Analysis,
        bar: ProgressBar,
        products: int,
    ) -> None:
        self._task, self._twins, self._chunk_size, self._wanted = task, twins, chunk_size, wanted
        self._bar, self._products, self._done = bar, products, 0

    def sharpness(self, branch: str) -> Part:
        """Measure the sharpness of the loss on training images, or on their twins for the adversarial branch."""
        wanted, model, loss = self._wanted, self._task.model, self._task.loss
        batches = list(self._sample(branch))
        surface = Surface(lambda images, labels: loss(model(images), labels), list(model.parameters()), batches)
        value, gradient = surface.value(), surface.gradient()
        if not math.isfinite(value + float(gradient.norm())):
            raise ValueError(f"the {branch} branch has a loss or gradient that is not finite: nothing to analyze")

        def product(vector: torch.Tensor) -> torch.Tensor:
            self._count(f"{branch} branch: Hessian")
            return surface.times_hessian(vector)

        start = random_start(gradient)
        found = largest_eigenvalues(product, start, wanted.eigenvalues, wanted.iterations, _TOLERANCE)
        total, error = trace(product, start, wanted.probes)
        self._count(f"{branch} branch: worst loss")
        return {
            "images": sum(len(images) for images, _ in batches),
            "weights": len(start),
            "weight_norm": float(surface.point.norm()),
            "loss": value,
            "gradient_norm": float(gradient.norm()),
            "eigenvalues": found.values,
            "residuals": found.residuals,
            "trace": total,
            "trace_error": None if math.isnan(error) else error,
            "worst_loss": worst_value(surface, wanted.rho, (gradient, found.vector), _ASCENT),
        }

    def accuracy(self, branch: str) -> Part:
        """Measure the accuracy on test images in percent, clean and under PGD through the same branch."""
        wanted, task = self._wanted, self._task
        self._count(f"{branch} branch: robust accuracy")
        attack = robust_attack(wanted.epsilon, wanted.steps, branch)
        batches = self._batches(task.data.test)
        found = evaluate(task.model, batches, device=task.device, attack=attack, autocast=task.autocast)
        return {"images": found.images, "test_top1": found.top1, "robust_top1": found.robust_top1}

    def _sample(self, branch: str) -> Iterator[tuple[torch.Tensor, Any]]:
        model, device = self._task.model, self._task.device
        like = next(model.parameters())
        for number, (raw, labels, *_) in enumerate(self._batches(self._task.data.train)):
            images, labels = to_pixels(raw, device, like.dtype), labels.to(device)
            if branch == "adv":
                images = self._twins(branch)(model, self._task.loss, images, labels, mix(0, number))
            yield images.detach(), labels

    def _batches(self, source: Source) -> Iterator[Any]:
        """Yield evenly spaced images, so that all classes are represented even if the data is sorted by class."""
        count = min(self._wanted.images, len(source))
        indices = np.linspace(0, len(source) - 1, count).round().astype(int).tolist()
        return evaluation_batches(source, self._chunk_size, self._task.augment.fit, self._task.workers, indices)

    def _count(self, text: str) -> None:
        self._done = min(self._done + 1, self._products)
        self._bar.show(self._done, text, f"{self._done}/{self._products}")
