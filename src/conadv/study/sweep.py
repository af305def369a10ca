"""Run the cells of a study side by side, each an ordinary run in a process of its own; what is done stays done.

DIR/  study.toml   results.jsonl   origin.json   runs/SLUG/ (the folder of a run)   logs/SLUG.txt
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from conadv.train.files import write_atomically
from conadv.train.signals import Interrupted

from .cells import NUMBERLESS, Cell, Resolve, flags
from .origin import record_origin
from .pool import Ended, Pool, usable_cores
from .progress import SweepWatch
from .results import FILE, Result, read_results, result_of, write_results
from .showcase import showcase
from .study_file import Study

# By the clock instead of by the epoch, which at full batch is a step; none of it changes a number.
_CHECKPOINTS = {"checkpoint.every": "1000000000", "checkpoint.minutes": "2", "checkpoint.keep": "1"}

# Cells of a sweep that was killed die with it, but not in the same instant.
_PATIENCE = 5.0


class Sweep:
    """A study on its way through the cells that are missing."""

    def __init__(self, study: Study, folder: Path, pool: Pool, watch: SweepWatch, lock: int) -> None:
        self._study = study
        self._folder = folder
        self._pool = pool
        self._watch = watch
        self._lock = lock
        self._shown = {cell.slug for cell in showcase(study.cells).values()}
        errors = _earlier_errors(folder)
        self._results = {cell.slug: result_of(cell, self._home(cell), errors.get(cell.slug)) for cell in study.cells}

    def run(self) -> list[Result]:
        """Every cell to its end; Interrupted where somebody asks to stop, after the cells have saved their state."""
        waiting = deque(cell for cell in self._study.cells if self._results[cell.slug].summary is None)
        for cell in self._study.cells:
            self._tidy(cell)
        self._watch.begin(self._write())
        with _noted_signals() as signals:
            while waiting or self._pool.running():
                if signals:
                    self._pool.stop()
                    raise Interrupted(signals[0])
                while waiting and self._pool.has_room:
                    self._start(waiting.popleft())
                for ended in self._pool.wait():
                    self._finish(ended)
                self._watch.show(self._pool.running(), len(waiting))
        return self._write()

    def _home(self, cell: Cell) -> Path:
        return self._folder / "runs" / cell.slug

    def _log(self, cell: Cell) -> Path:
        return self._folder / "logs" / f"{cell.slug}.txt"

    def _start(self, cell: Cell) -> None:
        threads = int(cell.values["threads"] or 1)
        words = train_words(cell, self._home(cell))
        self._pool.start(cell, [sys.executable, "-m", "conadv", *words], self._log(cell), self._lock, threads)

    def _finish(self, ended: Ended) -> None:
        cell: Cell = ended.key
        error = _error_line(self._log(cell), ended.status)
        self._results[cell.slug] = result_of(cell, self._home(cell), error)
        self._tidy(cell)
        self._write()
        self._watch.ended(self._results[cell.slug], ended.seconds)

    def _tidy(self, cell: Cell) -> None:
        """The state of a finished run is not needed any more, but for pictures of one run an arm."""
        kept = self._study.keep_checkpoints or cell.slug in self._shown
        if not kept and self._results[cell.slug].summary is not None:
            shutil.rmtree(self._home(cell) / "checkpoints", ignore_errors=True)

    def _write(self) -> list[Result]:
        results = list(self._results.values())
        write_results(self._folder, results)
        return results


def sweep(study: Study, folder: Path, resolve: Resolve, jobs: int | None, nice: int, quiet: bool) -> dict[str, Any]:
    """Run what is missing of a study, and return how many cells there are, how many are done and how many failed."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs} but must be 1 or more: change --jobs")
    if not 0 <= nice <= 19:
        raise ValueError(f"nice is {nice} but must be from 0 to 19: change --nice")
    threads = max(int(cell.values["threads"] or 1) for cell in study.cells)
    size = jobs or max(1, len(usable_cores()) // threads)
    _check_runs(study, folder, resolve)
    with _claimed(folder) as lock, SweepWatch(len(study.cells), size, quiet) as watch:
        write_atomically(folder / "study.toml", study.text)
        record_origin(folder)
        results = Sweep(study, folder, Pool(size, threads, nice), watch, lock).run()
    done = sum(result.summary is not None for result in results)
    failed = sum(result.error is not None for result in results)
    return {"study": study.title, "cells": len(results), "done": done, "failed": failed, "results": str(folder / FILE)}


def train_words(cell: Cell, home: Path) -> list[str]:
    """What follows `conadv` on the command line of a cell: a new run, or the rest of one that was stopped."""
    if (home / "config.toml").exists():
        return ["train", "--quiet", "--resume", str(home)]
    (home / ".config.toml.partial").unlink(missing_ok=True)  # of a run that was killed as it began
    return ["train", cell.recipe, *flags({**_CHECKPOINTS, **cell.overrides}), "--quiet", "--run", str(home)]


def _check_runs(study: Study, folder: Path, resolve: Resolve) -> None:
    """The runs that are there must be those that the study means: its recipe may have changed since."""
    for cell in study.cells:
        home = folder / "runs" / cell.slug
        if (home / "config.toml").exists():
            there = resolve(str(home / "config.toml"), {})
            changed = [key for key, value in cell.values.items() if key not in NUMBERLESS and there[key] != value]
            if changed:
                raise ValueError(
                    f"{str(home)!r} was run with {changed[0]} {there[changed[0]]}, and the recipe now says "
                    f"{cell.values[changed[0]]}: remove that folder, or name another with --out"
                )


@contextmanager
def _claimed(folder: Path) -> Iterator[int]:
    """One sweep at a time in a folder. The cells inherit the lock, so none of an earlier sweep is at work either."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ValueError(
            f"cannot write to {str(folder)!r} ({error.strerror}): name another folder with --out"
        ) from None
    try:
        _take(lock, folder)
        yield lock
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ValueError(f"another sweep is at work in {str(folder)!r}: wait for it, or stop it") from None
            time.sleep(0.1)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Within, the first SIGTERM or SIGINT is only noted, and a second one has its usual effect.

    No thread listens, as it does in a run: processes are forked here, and nothing that one waits for can hang.
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


def _earlier_errors(folder: Path) -> dict[str, str]:
    """Of cells that failed before: they are tried again, and until then their error stands."""
    try:
        return {result.cell: result.error for result in read_results(folder) if result.error is not None}
    except ValueError:
        return {}


def _error_line(log: Path, status: int) -> str:
    """What a failed cell said last."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines or [f"exit status {status}"])[-1]
