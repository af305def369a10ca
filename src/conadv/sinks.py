"""Metric sinks: where the metrics of a run go besides metrics.jsonl and the lines of progress. Loads no torch.

A new sink is a class here and one entry in `SINKS`; recipes and flags then know it (`log = "name"`, `--log name`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from conadv.atomic import write_atomically

Metrics = Mapping[str, Any]
Picture = Any  # an array of bytes, (height, width, 3): NumPy is not loaded here

# What TensorBoard compares runs by, in its table of hyper-parameters.
_COMPARED = ("test_top1", "train_top1", "gap", "test_loss", "robust_top1")


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step.

        Args:
            step: counts from 0. The final evaluation comes with the number of steps taken.
            metrics: numbers by name; those of an evaluation are among them in steps that had one.
        """


class Board(Sink, Protocol):
    """A sink of `--log`, which also shows pictures."""

    package: str
    """What it imports."""

    def __init__(self, folder: Path, start: int, values: Mapping[str, Any]) -> None:
        """Open it for the run in a folder, from a step on, with the values of its recipe by dotted key."""

    def show(self, step: int, name: str, picture: Picture) -> None:
        """Show a picture."""

    def close(self) -> None:
        """Write everything that is still buffered. Called once, at the end."""


class TensorBoard:
    """Event files in the folder tensorboard/ of the run: `tensorboard --logdir RUN`.

    Where a run resumes, at step `start`, TensorBoard hides what was logged from this step on.
    """

    package = "tensorboardX"

    def __init__(self, folder: Path, start: int, config: Metrics) -> None:
        writer = import_module("tensorboardX").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=start or None)
        plain = {key: value if isinstance(value, str | int | float) else str(value) for key, value in config.items()}
        # Not add_hparams, which would make a further run, in a folder of its own.
        for record in import_module("tensorboardX.summary").hparams(plain, dict.fromkeys(_COMPARED, 0.0)):
            self._writer.file_writer.add_summary(record)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in _finite(metrics).items():
            self._writer.add_scalar(name, value, step)

    def show(self, step: int, name: str, picture: Picture) -> None:
        self._writer.add_image(name, picture, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline unless WANDB_MODE says otherwise: `wandb sync RUN/wandb/offline-run-*`.

    A resumed run continues the same one, whose id is in RUN/wandb-id, and ignores steps that it has already.
    """

    package = "wandb"

    def __init__(self, folder: Path, start: int, config: Metrics) -> None:
        self._wandb = import_module("wandb")
        path = folder / "wandb-id"
        if not path.is_file():
            write_atomically(path, uuid4().hex)
        self._run = self._wandb.init(
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            id=path.read_text(encoding="utf-8", errors="replace").strip(),
            resume="allow",
            name=folder.name,
            config=dict(config),
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(_finite(metrics), step=step)

    def show(self, step: int, name: str, picture: Picture) -> None:
        self._run.log({name: self._wandb.Image(picture)}, step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, type[Board]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_sinks(names: Iterable[str]) -> None:
    """Raise a ValueError if the package of one of these sinks is not installed."""
    for name in names:
        package = SINKS[name].package
        if find_spec(package) is None:
            raise ValueError(
                f"--log {name} needs the package {package}, which is not installed: pip install 'conadv[{name}]'"
            )


def _finite(metrics: Metrics) -> dict[str, float]:
    """The metrics that can be plotted."""
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
