"""Where rank 0 writes metrics (sinks) and the state of a run (checkpoints). Other ranks write neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from conadv.sinks import Sink

from .checkpoint import Checkpoint
from .saver import Saver

OnMetrics = Callable[[dict[str, Any]], None]


class Sinks:
    """A sink that passes everything on to several others.

    Args:
        sinks: In the order in which they are called. Empty on ranks other than 0.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink, even if one of them fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class Callbacks:
    """A sink that calls Python functions with a dictionary of the step and its metrics.

    Args:
        on_step: Called after each step.
        on_evaluation: Called after each evaluation, with the metrics of the evaluation only.
    """

    def __init__(self, on_step: OnMetrics | None, on_evaluation: OnMetrics | None) -> None:
        self._on_step = on_step
        self._on_evaluation = on_evaluation

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        of_step = {name: value for name, value in metrics.items() if not is_of_evaluation(name)}
        evaluated = {name: value for name, value in metrics.items() if is_of_evaluation(name)}
        if self._on_step and of_step:
            self._on_step({"step": step, **of_step})
        if self._on_evaluation and evaluated:
            self._on_evaluation({"step": step, **evaluated})

    def close(self) -> None:
        pass


def is_of_evaluation(name: str) -> bool:
    """Whether a metric comes from an evaluation rather than from a training step."""
    return name in ("gap", "adv_top1", "held_out_top1") or any(part in name for part in ("test_", "train_", "robust_"))


class StateSaver(Protocol):
    """Saves the state of the training loop."""

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one so far."""

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        """Start saving the state after `step` steps; its tensors must not change before `before_update`."""

    def before_update(self) -> None:
        """Wait until the state has been copied, so that the next update may change it."""

    def requests_save(self, seconds: float) -> bool:
        """Return True once when this many seconds have passed since the last checkpoint; 0 seconds: never."""


class NullSaver:
    """The saver of ranks other than 0, which does nothing."""

    def check(self) -> None:
        pass

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        pass

    def before_update(self) -> None:
        pass

    def requests_save(self, seconds: float) -> bool:
        return False


class CheckpointSaver:
    """Writes checkpoints into the folder of a run.

    Args:
        folder: The folder of the run.
        keep: How many of the newest checkpoints to keep.
        about: The description of the run that every checkpoint contains.
        before: Called before each checkpoint is written: it flushes the metrics, which must not be older.
    """

    def __init__(self, folder: Path, keep: int, about: dict[str, Any], before: Callable[[], None]) -> None:
        self._saver = Saver(folder / "checkpoints", keep)
        self._about = about
        self._before = before
        self._saved = time.monotonic()
        self._requested = False

    def check(self) -> None:
        self._saver.check()

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        self._saver.save(step, Checkpoint(state(), {**self._about, **about}), before=self._before)
        self._saved, self._requested = time.monotonic(), False

    def before_update(self) -> None:
        self._saver.before_update()

    def requests_save(self, seconds: float) -> bool:
        # Once per checkpoint: if this rank may lag, all ranks save only some steps after its request.
        is_due = seconds > 0 and not self._requested and time.monotonic() - self._saved >= seconds
        self._requested = self._requested or is_due
        return is_due

    def close(self) -> None:
        """Wait until everything is on disk, and raise the error of a write that failed."""
        try:
            self._saver.wait()
        finally:
            self._saver.close()
