"""The weights with the best robust accuracy of a run, and a warning when that collapses."""

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

from .ema import Ema

FILE = "best.safetensors"
METRIC = "held_out_robust_top1"
_COLLAPSE = 0.5  # of the best accuracy


class BestWeights:
    """A sink that keeps the weights of the evaluation with the best robust accuracy on held-out images.

    Robust training with few steps may collapse within an epoch (catastrophic overfitting): the accuracy under a weak
    attack still rises, and that under a strong one falls to zero.

    Args:
        folder: of the run; weights of an earlier part of the run are found there.
        model: the network, split or not.
        ema: the moving average of its weights, which is evaluated and kept in their place.
        say: prints a line.
    """

    def __init__(self, folder: Path, model: nn.Module, ema: Ema, say: Callable[[str], None]) -> None:
        self._path = folder / FILE
        self._model, self._ema, self._say = model, ema, say
        self._best = read_about(self._path) if self._path.exists() else None
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of an evaluation; a step without one is nothing to look at."""
        if METRIC not in metrics:
            return
        accuracy = float(metrics[METRIC])
        if self._best is None or accuracy > self._best[METRIC]:
            self._best = {"step": step, METRIC: accuracy}
            with self._ema.swapped_in():
                tensors = {name: tensor.contiguous() for name, tensor in plain_state_dict(self._model).items()}
                data = safetensors.torch.save(tensors, {"about": json.dumps(self._best)})
            with writing(self._path):
                replace_file(self._path, data)
        elif accuracy < _COLLAPSE * self._best[METRIC] and not self._warned:
            self._warned = True
            self._say(
                f"robust accuracy on the held-out images fell from {self._best[METRIC]:.1f} % (step "
                f"{self._best['step']}) to {accuracy:.1f} %, which is catastrophic overfitting: those weights "
                f"are in {self._path}; try more --attack.steps or a smaller --attack.step-size"
            )

    def close(self) -> None:
        pass


def read_about(path: Path) -> dict[str, Any]:
    """Return the step of the weights in a file, and their robust accuracy on the held-out images."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
        return about
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
        raise ValueError(f"{path} is damaged: remove it") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, by the names of the plain model."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; a run with --data.held-out and --eval-every writes it")
    tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    return tensors
