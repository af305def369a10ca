"""metrics.jsonl, the sink that every run has: one line per step; and a sink that calls Python functions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conadv.atomic import replace_file, writing
from conadv.printing import for_json

OnMetrics = Callable[[dict[str, Any]], None]


class Metrics:
    """The sink that writes metrics.jsonl from step `start` on; a resumed run has no gap and no duplicate in it."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        kept = [line for line in read_metrics(path) if line["step"] < start]
        self.missing = start - len(kept)
        """How many steps before `start` have no line, because the file was damaged."""
        with writing(path):
            replace_file(path, b"".join(_line(fields) for fields in kept))
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        data = _line({"step": step, **for_json(metrics)})
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


class Callback(NamedTuple):
    """A sink that calls a function with the step and its metrics, if they include this one."""

    function: OnMetrics
    key: str
    """loss for steps, test_top1 for evaluations."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.key in metrics:
            self.function({"step": step, **metrics})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, if it is there, up to the first one that is damaged or out of order."""
    if path.exists() and not path.is_file():  # a pipe or a device would keep us waiting, or never end
        raise ValueError(f"{path} is not a regular file: remove it")
    lines: list[dict[str, Any]] = []
    for data in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            found: Any = json.loads(data) if data.endswith(b"\n") else None
            match found:
                case {"step": int(step)} as line if step > (lines[-1]["step"] if lines else -1):
                    lines.append(line)
                case _:
                    break
        except (ValueError, RecursionError):
            break
    return lines


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
