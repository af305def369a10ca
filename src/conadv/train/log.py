"""What a run tells: a line a step in metrics.jsonl, and its progress to whoever watches."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Metrics:
    """metrics.jsonl: one line a step, no gap and no line twice, however often the run was stopped."""

    def __init__(self, path: Path, start: int) -> None:
        _cut(path, start)
        self._file = path.open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """To the disk: a checkpoint must never be newer than the lines before it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a line that a killed run left half written ends them."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    return lines


def _cut(path: Path, start: int) -> None:
    """Keep the lines of the steps before `start`; those after it are taken again."""
    kept = [line for line in read_metrics(path) if line["step"] < start]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def write_atomically(path: Path, text: str) -> None:
    """The file has its old text or the new one, at any moment."""
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class Watch:
    """Progress: a bar on a terminal, a plain line now and then elsewhere, nothing when quiet."""

    def __init__(self, start: int, stop: int, quiet: bool, stream: TextIO = sys.stderr) -> None:
        self._stop = stop
        self._stream = stream
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
