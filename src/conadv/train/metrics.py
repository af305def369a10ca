"""metrics.jsonl: one line per step, written so that a resumed run has no gap and no duplicate."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import write_atomically, writing

# A line has a few hundred bytes; more than this was not written by us.
_LONGEST_LINE = 2**16


class Metrics:
    """metrics.jsonl: one line a step, no gap and no line twice, however often the run was stopped."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        kept = list(_kept_lines(path, start))
        self.missing = start - len(kept)
        """Steps before `start` that have no line, because the file was damaged."""
        write_atomically(path, "".join(kept))
        self._file = path.open("ab", buffering=0)

    def write(self, **line: Any) -> None:
        data = (json.dumps({key: _or_null(value) for key, value in line.items()}) + "\n").encode()
        before = self._file.tell()
        with writing(self._path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(before)  # no half line on a disk that is full
                raise

    def flush(self) -> None:
        """To the disk: a checkpoint must never be newer than the lines before it. Any thread may ask for it."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a line that a killed run left half written ends them."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if _step_of(line) is None:
                break
            lines.append(json.loads(line))
    return lines


def _or_null(value: Any) -> Any:
    """JSON has no word for numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept_lines(path: Path, start: int) -> Iterator[str]:
    """The lines of the steps before `start`, each once and in order; those after it are taken again."""
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path} is no file: remove it")
    last = -1
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            step = _step_of(line)
            if step is not None and last < step < start:
                last = step
                yield line.decode()


def _step_of(line: bytes) -> int | None:
    """The step that a line is about; None: it is damaged."""
    try:
        match json.loads(line):
            case {"step": int(step)} if line.endswith(b"\n"):
                return step
    except (ValueError, RecursionError):
        pass
    return None
