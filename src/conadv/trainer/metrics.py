"""Metrics of a run, passed to sinks on rank 0; metrics.jsonl is the sink that every run has: one line per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conadv.atomic import replace_file, writing
from conadv.sinks import Sink

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


class Metrics:
    """The sink that writes metrics.jsonl; a resumed run has no gap and no duplicate in it.

    Args:
        path: The file. Lines of earlier steps stay.
        start: The step from which on lines are written; later lines in the file are dropped.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        kept, last = [], -1
        for line in _lines(path):
            fields = _parsed(line)
            if fields is not None and last < fields["step"] < start:
                last = fields["step"]
                kept.append(line)
        self.missing = start - len(kept)
        """How many steps before `start` have no line, because the file was damaged."""
        with writing(path):
            replace_file(path, b"".join(kept))
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        data = json.dumps({key: _or_null(value) for key, value in {"step": step, **metrics}.items()}).encode() + b"\n"
        before = self._file.tell()
        with writing(self._path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(before)  # leave no partial line on a full disk
                raise

    def flush(self) -> None:
        """Flush all lines to the disk, from any thread; called before a checkpoint is written."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


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
        for callback, evaluated in ((self._on_step, False), (self._on_evaluation, True)):
            chosen = {name: value for name, value in metrics.items() if is_of_evaluation(name) == evaluated}
            if callback and chosen:
                callback({"step": step, **chosen})

    def close(self) -> None:
        pass


def is_of_evaluation(name: str) -> bool:
    """Whether a metric comes from an evaluation rather than from a training step."""
    return name in ("gap", "adv_top1", "held_out_top1") or any(part in name for part in ("test_", "train_", "robust_"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, one dictionary each, up to the first one that is damaged or incomplete.

    Args:
        path: The file; if it does not exist, there are no lines.
    """
    lines: list[dict[str, Any]] = []
    for data in _lines(path):
        line = _parsed(data)
        if line is None:
            break
        lines.append(line)
    return lines


def _lines(path: Path) -> list[bytes]:
    if path.exists() and not path.is_file():  # a pipe or a device would keep us waiting, or never end
        raise ValueError(f"{path} is not a regular file: remove it")
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _parsed(data: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is damaged."""
    try:
        line = json.loads(data) if data.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _or_null(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
