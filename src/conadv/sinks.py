"""Metric sinks: where the metrics of a run go besides metrics.jsonl and the progress bar. Loads no torch.

A new sink is a class here and one row in `SINKS`; recipes and flags then know it (`log = "name"`, `--log name`).
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from conadv.atomic import replacing_path, write_atomically

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

    def close(self) -> None:
        """Write everything that is still buffered. Called once, at the end."""


@runtime_checkable
class Gallery(Sink, Protocol):
    """A sink that also shows pictures."""

    def show(self, step: int, name: str, picture: Picture) -> None:
        """Show a picture of one step."""


class Csv:
    """metrics.csv: one row per step, and an empty cell where a step has no such metric.

    Args:
        folder: The folder of the run.
        start: The step at which the run starts or resumes; rows from this step on are dropped.
        config: Unused.
    """

    def __init__(self, folder: Path, start: int, config: Metrics) -> None:
        self._path = folder / "metrics.csv"
        self._columns: list[str] = ["step"]
        rows = self._kept(start)
        self._rewrite(rows)

    def log(self, step: int, metrics: Metrics) -> None:
        row = {"step": step, **metrics}
        new = [name for name in row if name not in self._columns]
        if new:
            self._file.close()
            rows = self._kept(None)
            self._columns += new
            self._rewrite(rows)
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _kept(self, start: int | None) -> list[dict[str, Any]]:
        """The rows of the file before step `start`, without a truncated one. Takes over the columns of the file."""
        if not self._path.exists():
            return []
        if not self._path.is_file():  # a pipe would keep us waiting
            raise ValueError(f"{self._path} is not a regular file: remove it")
        with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if _is_whole(row, start)]
            self._columns = list(reader.fieldnames or self._columns)
        return rows

    def _rewrite(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replace the file atomically by one with the current columns."""
        with replacing_path(self._path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        self._file = self._path.open("a", newline="", encoding="utf-8")


class TensorBoard:
    """Event files in the folder tensorboard/ of the run: `tensorboard --logdir RUN`.

    Args:
        folder: The folder of the run.
        start: The step at which the run starts or resumes; TensorBoard hides what was logged from this step on.
        config: The values of the recipe, by dotted key: the hyper-parameters.
    """

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

    A resumed run continues the same one, whose id is in RUN/wandb-id.

    Args:
        folder: The folder of the run.
        start: Unused: Weights & Biases ignores steps that it has already.
        config: The values of the recipe, by dotted key.
    """

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


@dataclass(frozen=True)
class SinkInfo:
    """One sink as recipes know it."""

    make: Callable[[Path, int, Metrics], Sink]
    """From the folder of the run, the step to start at, and the values of the recipe by dotted key."""
    package: str | None = None
    """What it imports, which `pip install 'conadv[NAME of the sink]'` installs; None: nothing."""


SINKS = {
    "csv": SinkInfo(Csv),
    "tensorboard": SinkInfo(TensorBoard, "tensorboardX"),
    "wandb": SinkInfo(Wandb, "wandb"),
}


def check_sinks(names: Iterable[str]) -> None:
    """Raise a ValueError if the package of a sink is not installed.

    Args:
        names: of the sinks, as in `SINKS`.
    """
    for name in names:
        package = SINKS[name].package
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f"--log {name} needs the package {package}, which is not installed: pip install 'conadv[{name}]'"
            )


def _is_whole(row: Mapping[str | Any, Any], start: int | None) -> bool:
    step = row.get("step") or ""
    return None not in row and None not in row.values() and step.isdecimal() and (start is None or int(step) < start)


def _finite(metrics: Metrics) -> dict[str, float]:
    """The metrics that can be plotted."""
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}
