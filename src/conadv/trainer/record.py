"""What a run records: metrics, which go to sinks, and its state, which goes to checkpoints.

Only rank 0 has sinks and writes checkpoints.
"""

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
    """Several sinks as one.

    Args:
        sinks: Each gets everything, in this order. None at all on ranks other than 0.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink, also when one of them fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


class Callbacks:
    """The sink of a Python program: functions that are called with the metrics and their step.

    Args:
        on_step: Called after each step.
        on_evaluation: Called after each evaluation, with its metrics alone.
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
    return name == "gap" or any(part in name for part in ("test_", "train_", "robust_"))


class StateSaver(Protocol):
    """Where the loop leaves its state."""

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if one is known."""

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        """Keep the state after `step` steps, whose tensors must not change before `before_update`."""

    def before_update(self) -> None:
        """Let the next update come after the copy of what it changes."""

    def requests_save(self, seconds: float) -> bool:
        """True once when this many seconds have passed since the last checkpoint; 0 seconds: never."""


class NullSaver:
    """The saver of ranks other than 0."""

    def check(self) -> None:
        pass

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        pass

    def before_update(self) -> None:
        pass

    def requests_save(self, seconds: float) -> bool:
        return False


class CheckpointSaver:
    """Checkpoints in the folder of a run.

    Args:
        folder: The folder of the run.
        keep: How many of the newest checkpoints stay.
        about: What every checkpoint says of the run.
        before: Called before a checkpoint is written: it must not be newer than the metrics on disk.
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
        # Only once: a rank that may lag hears of the request some steps later.
        is_due = seconds > 0 and not self._requested and time.monotonic() - self._saved >= seconds
        self._requested = self._requested or is_due
        return is_due

    def close(self) -> None:
        """Wait until everything is on disk; raises what went wrong."""
        try:
            self._saver.wait()
        finally:
            self._saver.close()
