"""Run the cells of a study in parallel, each as an ordinary run in its own process. Finished cells are never repeated:
a cell is finished if its run folder has a summary, or if it has no run folder but a result in results.jsonl.

DIR/  study.toml   results.jsonl   origin.json   runs/SLUG/ (run folders)   logs/SLUG.txt
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from conadv.machine import usable_cores
from conadv.trainer.files import write_atomically
from conadv.trainer.progress import ProgressBar
from conadv.trainer.signals import Interrupted

from .origin import record_origin
from .pool import Job, Pool
from .progress import SweepProgress
from .results import FILE, Result, last_error, read_results, read_summary, result_of, write_results
from .study_file import NUMBERLESS, Cell, Resolve, Study, flags, identity_of

# Checkpoint by time, because an epoch may be a single step. This does not change any result.
_CHECKPOINTS = {"checkpoint.every": "1000000000", "checkpoint.minutes": "2", "checkpoint.keep": "1"}

# Seconds to wait for the lock: the cells of a killed sweep need a moment to die.
_PATIENCE = 5.0


class Sweep:
    """Runs the missing cells of a study."""

    def __init__(
        self, study: Study, folder: Path, earlier: Earlier, pool: Pool, progress: SweepProgress, lock: int
    ) -> None:
        self._study = study
        self._folder = folder
        self._pool = pool
        self._progress = progress
        self._lock = lock
        self._commit: str | None = None
        self._results = {cell.slug: earlier.result(cell, self._home(cell)) for cell in study.cells}

    def run(self) -> list[Result]:
        """Run all missing cells. On SIGTERM or SIGINT, let the cells save their state, then raise Interrupted."""
        waiting = deque(cell for cell in self._study.cells if self._results[cell.slug].summary is None)
        if waiting:
            self._commit = record_origin(self._folder)
        for cell in self._study.cells:
            self._tidy(cell)
        self._progress.begin(self._write())
        with _noted_signals() as signals:
            while waiting or self._pool.running:
                if signals:
                    self._pool.stop()
                    raise Interrupted(signals[0])
                while waiting and self._pool.has_room:
                    self._start(waiting.popleft())
                for ended in self._pool.wait():
                    self._finish(ended)
                self._progress.show([job.seconds for job in self._pool.running], len(waiting))
        return self._write()

    def _home(self, cell: Cell) -> Path:
        return self._folder / "runs" / cell.slug

    def _log(self, cell: Cell) -> Path:
        return self._folder / "logs" / f"{cell.slug}.txt"

    def _start(self, cell: Cell) -> None:
        threads = int(cell.values["threads"] or 1)
        words = train_words(cell, self._home(cell))
        self._progress.started(cell.name)
        self._pool.start(cell, [sys.executable, "-m", "conadv", *words], self._log(cell), self._lock, threads)

    def _finish(self, ended: Job) -> None:
        cell: Cell = ended.key
        error = _error_line(self._log(cell), ended.status or 0)
        self._results[cell.slug] = result_of(cell, read_summary(self._home(cell)), error, self._commit)
        self._tidy(cell)
        self._write()
        self._progress.ended(self._results[cell.slug], ended.seconds)

    def _tidy(self, cell: Cell) -> None:
        """Remove the checkpoints of a finished run, unless the study keeps them."""
        if not self._study.keep_checkpoints and self._results[cell.slug].summary is not None:
            shutil.rmtree(self._home(cell) / "checkpoints", ignore_errors=True)

    def _write(self) -> list[Result]:
        results = list(self._results.values())
        write_results(self._folder, results)
        return results


class Earlier:
    """The lines of an existing results.jsonl."""

    def __init__(self, folder: Path, added: Mapping[str, Any]) -> None:
        self._lines = read_results(folder) if (folder / FILE).exists() else []
        self._by_cell = {line.cell: line for line in self._lines}
        self._done = {identity_of({**added, **line.values}): line for line in self._lines if line.summary is not None}

    def result(self, cell: Cell, home: Path) -> Result:
        """The result of a cell: from its run folder, else from a finished line with the same values."""
        summary, same, own = read_summary(home), self._done.get(identity_of(cell.values)), self._by_cell.get(cell.slug)
        if same and summary is None and not (home / "config.toml").exists():
            return result_of(cell, same.summary, None, same.commit)
        return result_of(cell, summary, own.error if own else None, own.commit if own else None)

    def check_kept(self, study: Study, folder: Path) -> None:
        """Refuse to overwrite lines that are the only record of a finished cell."""
        known = {identity_of(cell.values) for cell in study.cells}
        lost = [line for identity, line in self._done.items() if identity not in known]
        gone = [line.name for line in lost if read_summary(folder / "runs" / line.cell) is None]
        if gone:
            raise ValueError(
                f"{str(folder / FILE)!r} has finished cells without a run folder that are not in the study "
                f"({len(gone)}, such as {gone[0]!r}): choose another folder with --out, or remove their lines"
            )


def sweep(
    study: Study,
    folder: Path,
    resolve: Resolve,
    added: Mapping[str, Any],
    jobs: int | None,
    nice: int,
    quiet: bool,
) -> dict[str, Any]:
    """Run the missing cells of a study, and return what `conadv sweep` prints.

    `added` are recipe fields that were added later, with the values that older results stand for.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs} but must be 1 or more: change --jobs")
    if not 0 <= nice <= 19:
        raise ValueError(f"nice is {nice} but must be from 0 to 19: change --nice")
    threads = max(int(cell.values["threads"] or 1) for cell in study.cells)
    size = jobs or max(1, len(usable_cores()) // threads)
    _check_runs(study, folder, resolve)
    bar = ProgressBar(0, len(study.cells), quiet, seconds=60, estimates=False)
    with _claimed(folder) as lock, bar:
        earlier = Earlier(folder, added)
        earlier.check_kept(study, folder)
        write_atomically(folder / "study.toml", study.text)
        progress = SweepProgress(bar, len(study.cells), size)
        results = Sweep(study, folder, earlier, Pool(size, threads, nice), progress, lock).run()
    done = sum(result.summary is not None for result in results)
    failed = sum(result.error is not None for result in results)
    return {"study": study.title, "cells": len(results), "done": done, "failed": failed, "results": str(folder / FILE)}


def train_words(cell: Cell, home: Path) -> list[str]:
    """Arguments of `conadv` for a cell: start a run, or resume one that was stopped."""
    if (home / "config.toml").exists():
        return ["train", "--quiet", "--resume", str(home)]
    for partial in home.glob(".config.toml*.partial"):  # left by a run that was killed while starting
        partial.unlink()
    return ["train", cell.recipe, *flags({**_CHECKPOINTS, **cell.overrides}), "--quiet", "--run-dir", str(home)]


def _check_runs(study: Study, folder: Path, resolve: Resolve) -> None:
    """Refuse run folders whose recipe differs from the study's: the study or its recipe may have changed."""
    for cell in study.cells:
        home = folder / "runs" / cell.slug
        if (home / "config.toml").exists():
            there = resolve(str(home / "config.toml"), {})
            changed = [key for key, value in cell.values.items() if key not in NUMBERLESS and there[key] != value]
            if changed:
                raise ValueError(
                    f"{str(home)!r} was run with {changed[0]} {there[changed[0]]}, but the study now has "
                    f"{cell.values[changed[0]]}: remove that folder, or choose another one with --out"
                )


@contextmanager
def _claimed(folder: Path) -> Iterator[int]:
    """Lock the folder for this sweep. Cells inherit the lock, so it also waits for cells of an earlier sweep."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ValueError(f"cannot write to {str(folder)!r} ({error.strerror}): choose another with --out") from None
    deadline = time.monotonic() + _PATIENCE
    try:
        while not _took(lock):
            if time.monotonic() > deadline:
                raise ValueError(f"another sweep is running in {str(folder)!r}: wait for it, or stop it")
            time.sleep(0.1)
        yield lock
    finally:
        os.close(lock)


def _took(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect the first SIGTERM or SIGINT in a list; a second one has its default effect.

    Unlike in a run, there is no listener thread, because processes are forked here.
    """
    signals: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for known in before:
            signal.signal(known, signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _error_line(log: Path, status: int) -> str:
    """The last error message of a failed cell."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return last_error(log.read_text(encoding="utf-8", errors="replace"), f"exit status {status}")
