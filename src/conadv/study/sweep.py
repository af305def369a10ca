"""Run the cells of a study in parallel, each as an ordinary run in its own process. Finished cells are never repeated:
a cell is finished if its run folder has a summary, or if it has no run folder but a result in results.jsonl.

DIR/  study.toml   results.jsonl   origin.json   runs/SLUG/ (run folders)   logs/SLUG.txt
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from conadv.atomic import write_atomically
from conadv.config import flatten, load_recipe
from conadv.machine import usable_cores
from conadv.printing import duration
from conadv.trainer.stop import Interrupted, StopRequest, listening

from .results import FILE, Cell, read_results, read_summary, record_origin, write_results
from .study_file import NUMBERLESS, Study, flags, identity_of

# Not once per epoch, which may be a single step. This does not change any result.
_CHECKPOINTS = {"checkpoint.every": "200", "checkpoint.keep": "1"}

# Seconds to wait for the lock: a sweep that was just stopped needs a moment to end.
_PATIENCE = 5.0
_POLL_SECONDS = 0.1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Running(NamedTuple):
    """A cell that is running."""

    cell: Cell
    process: subprocess.Popen[bytes]
    cores: frozenset[int]
    began: float


def sweep(study: Study, folder: Path, jobs: int | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the missing cells of a study, `jobs` at a time (None: as many as the cores allow).

    On SIGTERM or SIGINT, let the running cells save their state, then raise Interrupted.

    Returns:
        What `conadv sweep` prints.
    """
    _check_runs(study, folder)
    with _claimed(folder), listening() as request:
        request.obey_by(None)  # not at once: the running cells save their state first
        cells = known_cells(study, folder)
        write_atomically(folder / "study.toml", study.text)
        _run_missing(study, folder, cells, jobs, request, tell)
    done = sum(cell.summary is not None for cell in cells.values())
    failed = sum(cell.error is not None for cell in cells.values())
    return {"study": study.title, "cells": len(cells), "done": done, "failed": failed, "results": str(folder / FILE)}


def known_cells(study: Study, folder: Path) -> dict[str, Cell]:
    """The cells by folder, with what is known: from the run folder, else from a finished line with the same values.

    ValueError if a line that is the only record of a finished cell would be lost.
    """
    lines = read_results(folder) if (folder / FILE).exists() else []
    own = {line.cell: line for line in lines}
    done = {identity: line for line in lines if line.summary and (identity := identity_of(line))}
    cells, known = {}, set()
    for cell in study.cells:
        home, identity = folder / "runs" / cell.cell, identity_of(cell)
        known.add(identity)
        summary, line = read_summary(home), own.get(cell.cell, cell)
        if summary is None and identity in done and not (home / "config.toml").exists():
            summary, line = done[identity].summary, done[identity]
        error = line.error if summary is None else None
        cells[cell.cell] = replace(cell, summary=summary, error=error, commit=line.commit)
    lost = [line for line in lines if line.summary and identity_of(line) not in known]
    gone = [line.name for line in lost if read_summary(folder / "runs" / line.cell) is None]
    if gone:
        raise ValueError(
            f"{str(folder / FILE)!r} has finished cells without a run folder that are not in the study "
            f"({len(gone)}, such as {gone[0]!r}): choose another folder with --out, or remove their lines"
        )
    return cells


def train_words(cell: Cell, home: Path) -> list[str]:
    """Arguments of `conadv` for a cell: start a run, or resume one that was stopped."""
    if (home / "config.toml").exists():
        return ["train", "--quiet", "--resume", str(home)]
    _, *words = shlex.split(cell.command)
    fewer = {key: value for key, value in _CHECKPOINTS.items() if key not in cell.overrides}
    return [*words, *flags(fewer), "--quiet", "--run-dir", str(home)]


def start(command: list[str], log: Path, cores: frozenset[int], threads: int) -> subprocess.Popen[bytes]:
    """Start a process on some cores, with its output in a file. It dies with this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)  # what a link points to would be written over
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        os.sched_setaffinity(0, cores)
        # Otherwise a run of a killed sweep would keep writing to a folder that the next sweep resumes.
        library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            process_group=0,  # Ctrl-C reaches only this process, which passes it on
            preexec_fn=prepare if sys.platform == "linux" else None,
        )


def _run_missing(
    study: Study, folder: Path, cells: dict[str, Cell], jobs: int | None, request: StopRequest,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Run all cells without a summary, and rewrite results.jsonl whenever one has ended."""
    waiting = [cell for cell in cells.values() if cell.summary is None]
    commit = record_origin(folder) if waiting else None
    threads = max(int(cell.values["threads"] or 1) for cell in study.cells)
    cores = usable_cores()
    jobs = jobs or max(1, len(cores) // threads)
    free = [frozenset(cores[(job * threads + n) % len(cores)] for n in range(threads)) for job in range(jobs)]
    running: list[Running] = []
    for cell in cells.values():
        _tidy(study, folder, cell)
    write_results(folder, cells.values())
    done = len(cells) - len(waiting)
    tell(f"{len(cells)} cells, {jobs} at a time, {done} are already done{_remaining(cells.values(), waiting, jobs)}")
    while waiting or running:
        if request.signal:
            tell("stopping: the running cells save a checkpoint; the same command resumes them")
            for one in running:
                one.process.send_signal(signal.SIGTERM)
            for one in running:
                one.process.wait()
            raise Interrupted(request.signal)
        while waiting and free:
            cell, own = waiting.pop(0), free.pop(0)
            words = [sys.executable, "-m", "conadv", *train_words(cell, folder / "runs" / cell.cell)]
            process = start(words, _log(folder, cell), own, int(cell.values["threads"] or 1))
            running.append(Running(cell, process, own, time.monotonic()))
        ended = [one for one in running if one.process.poll() is not None]
        running = [one for one in running if one not in ended]
        for one in ended:
            free.append(one.cores)
            summary = read_summary(folder / "runs" / one.cell.cell)
            error = _error_line(_log(folder, one.cell), one.process.returncode) if summary is None else None
            cell = cells[one.cell.cell] = replace(one.cell, summary=summary, error=error, commit=commit)
            _tidy(study, folder, cell)
            write_results(folder, cells.values())
            left = [*waiting, *(other.cell for other in running)]
            count = f"[{len(cells) - len(left)}/{len(cells)}]"
            accuracy = (summary or {}).get("test_top1")
            outcome = f"failed: {error}" if summary is None else "done" if accuracy is None else f"{accuracy:.2f} %"
            took = duration(time.monotonic() - one.began)
            tell(f"{count} {cell.name}: {outcome} ({took}){_remaining(cells.values(), left, jobs)}")
        if not ended:
            time.sleep(_POLL_SECONDS)


def _remaining(cells: Iterable[Cell], left: list[Cell], jobs: int) -> str:
    """About how long the cells that are left take, by the last finished run of each arm; empty if there is none."""
    times = {one.arm: float(one.summary.get("seconds") or 0.0) for one in cells if one.summary}
    if not left or not times:
        return ""
    work = sum(times.get(one.arm, fmean(times.values())) for one in left)
    return f", about {duration(work / min(jobs, len(left)))} left"


def _tidy(study: Study, folder: Path, cell: Cell) -> None:
    """Remove the checkpoints of a finished run, unless the study keeps them."""
    if not study.keep_checkpoints and cell.summary is not None:
        shutil.rmtree(folder / "runs" / cell.cell / "checkpoints", ignore_errors=True)


def _log(folder: Path, cell: Cell) -> Path:
    return folder / "logs" / f"{cell.cell}.txt"


def _error_line(log: Path, status: int) -> str:
    """The last error message in the output of a failed cell, else its last line."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [f"exit status {status}"])[-1]


def _check_runs(study: Study, folder: Path) -> None:
    """Refuse run folders whose recipe differs from the study's: the study or its recipe may have changed."""
    for cell in study.cells:
        home = folder / "runs" / cell.cell
        if not (home / "config.toml").exists():
            continue
        try:
            there = flatten(load_recipe(home / "config.toml"))
        except ValueError:
            if read_summary(home) is None:
                raise
            continue  # finished with another version, which had other fields
        changed = [key for key, value in cell.values.items() if key not in NUMBERLESS and there[key] != value]
        if changed:
            raise ValueError(
                f"{str(home)!r} was run with {changed[0]} {there[changed[0]]}, but the study now has "
                f"{cell.values[changed[0]]}: remove that folder, or choose another one with --out"
            )


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Lock the folder for this sweep."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=_PATIENCE):
            yield
    except Timeout:
        raise ValueError(f"another sweep is running in {str(folder)!r}: wait for it, or stop it") from None
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise ValueError(f"cannot write to {str(folder)!r} ({error.strerror}): choose another with --out") from None
