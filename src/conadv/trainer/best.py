"""The weights with the best accuracy of a run (best.safetensors), and a warning when robust accuracy collapses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from conadv.atomic import replace_file, writing
from conadv.core.splitbn import plain_state_dict

FILE = "best.safetensors"
# The first of these that an evaluation has decides.
METRICS = ("held_out_robust_top1", "test_top1")
_COLLAPSE = 0.5  # of the best robust accuracy


class BestWeights:
    """A sink that keeps the weights of the best evaluation: robust accuracy on held-out images, or test accuracy.

    Robust training with few steps may collapse within an epoch (catastrophic overfitting): the accuracy under a weak
    attack still rises, and that under a strong one falls to zero.

    Args:
        folder: of the run; weights of an earlier part of the run are found there.
        model: the network, split or not.
        say: prints a line.
    """

    def __init__(self, folder: Path, model: nn.Module, say: Callable[[str], None]) -> None:
        self._path = folder / FILE
        self._model, self._say = model, say
        self._best = read_best(self._path)[0] if self._path.exists() else None
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of an evaluation; a step without one is nothing to look at."""
        metric = next((name for name in METRICS if name in metrics), None)
        if metric is None:
            return
        accuracy = float(metrics[metric])
        if self._best is None or accuracy > self._best[metric]:
            self._best = {"step": step, metric: accuracy}
            tensors = {name: tensor.contiguous() for name, tensor in plain_state_dict(self._model).items()}
            data = safetensors.torch.save(tensors, {"about": json.dumps(self._best)})
            with writing(self._path):
                replace_file(self._path, data)
        elif metric == METRICS[0] and accuracy < _COLLAPSE * self._best[metric] and not self._warned:
            self._warned = True
            self._say(
                f"robust accuracy on the held-out images fell from {self._best[metric]:.1f} % (step "
                f"{self._best['step']}) to {accuracy:.1f} %, which is catastrophic overfitting: those weights "
                f"are in {self._path}; try more --attack.steps or a smaller --attack.step-size"
            )

    def close(self) -> None:
        pass


def read_best(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the step and the accuracy of the weights in a file, and the weights by the names of the plain model."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; a run with --eval-every writes it")
    try:
        with safetensors.safe_open(path, "pt") as file:
            return json.loads(file.metadata()["about"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
        raise ValueError(f"{path} is damaged: remove it") from None
