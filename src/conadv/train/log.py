"""What a run tells: a line a step in metrics.jsonl, and its progress to whoever watches."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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


class Watch:
    """Progress: a bar on a terminal, a plain line now and then elsewhere, nothing when quiet."""

    def __init__(self, start: int, stop: int, quiet: bool, stream: TextIO | None = None) -> None:
        self._stop = stop
        self._stream = stream = stream or sys.stderr
        self._bar: Progress | None = None
        self._quiet = quiet
        self._last_line = time.monotonic()
        if not quiet and stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("training", total=stop, completed=start)

    def __enter__(self) -> Watch:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, step: int, loss: float, rate: float) -> None:
        """A step was taken; `step` counts from 1."""
        text = f"loss {loss:.4f}  lr {rate:.4g}"
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
        elif not self._quiet and (step == self._stop or time.monotonic() - self._last_line > 5):
            self._last_line = time.monotonic()
            self.say(f"step {step}/{self._stop}  {text}")

    def say(self, text: str) -> None:
        """A line that is told once."""
        if self._bar:
            self._bar.console.print(text, highlight=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)
