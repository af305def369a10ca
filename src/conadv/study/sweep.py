"""Run the cells of a study in parallel, each as an ordinary run in its own process. Finished cells are never repeated:
a cell is finished if its run folder has a summary, or if it has no run folder but a result in results.jsonl.

DIR/  study.toml   results.jsonl   origin.json   runs/SLUG/ (run folders)   logs/SLUG.txt
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from conadv.atomic import write_atomically
from conadv.machine import usable_cores
from conadv.readable import duration
from conadv.trainer.stop import Interrupted, StopRequest, listening

from .results import FILE, Result, last_error, read_results, read_summary, record_origin, result_of, write_results
from .study_file import NUMBERLESS, Cell, Resolve, Study, flags, identity_of

# Not once per epoch, which may be a single step. This does not change any result.
_CHECKPOINTS = {"checkpoint.every": "200", "checkpoint.keep": "1"}

# Seconds to wait for the lock: a sweep that was just stopped needs a moment to end.
_PATIENCE = 5.0
_POLL_SECONDS = 0.1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl

Tell = Callable[[str], None]


class Running(NamedTuple):
    """A cell that is running."""

    cell: Cell
    process: subprocess.Popen[bytes]
    cores: frozenset[int]
    began: float


def sweep(
    study: Study, folder: Path, resolve: Resolve, added: Mapping[str, Any], jobs: int | None, nice: int, tell: Tell
) -> dict[str, Any]:
    """Run the missing cells of a study, and return what `conadv sweep` prints.

    On SIGTERM or SIGINT, let the running cells save their state, then raise Interrupted.

    Args:
        study: the study.
        folder: the folder to write.
        resolve: reads a recipe.
        added: recipe fields that were added later, with the values that older results stand for.
        jobs: how many cells run at a time; None: as many as the cores allow.
        nice: niceness of the cells.
        tell: prints one line of progress.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs} but must be 1 or more: change --jobs")
    if not 0 <= nice <= 19:
        raise ValueError(f"nice is {nice} but must be from 0 to 19: change --nice")
    _check_runs(study, folder, resolve)
    with _claimed(folder), listening() as request:
        request.obey_by(None)  # not at once: the running cells save their state first
        results = known_results(study, folder, added)
        write_atomically(folder / "study.toml", study.text)
        _run_missing(study, folder, results, jobs, nice, request, tell)
    done = sum(result.summary is not None for result in results.values())
    failed = sum(result.error is not None for result in results.values())
    return {"study": study.title, "cells": len(results), "done": done, "failed": failed, "results": str(folder / FILE)}


def known_results(study: Study, folder: Path, added: Mapping[str, Any]) -> dict[str, Result]:
    """What is known about each cell: from its run folder, else from a finished line with the same values.

    ValueError if a line that is the only record of a finished cell would be lost.
    """
    lines = read_results(folder) if (folder / FILE).exists() else []
    keys = study.cells[0].values.keys()
    done = {identity: line for line in lines if line.summary and (identity := identity_of(line, added, keys))}
    own = {line.cell: line for line in lines}
    results, known = {}, set()
    for cell in study.cells:
        home = folder / "runs" / cell.slug
        identity = identity_of(cell, {}, keys)
        known.add(identity)
        summary, same, line = read_summary(home), done.get(identity), own.get(cell.slug)
        if same and summary is None and not (home / "config.toml").exists():
            results[cell.slug] = result_of(cell, same.summary, None, same.commit)
        else:
            results[cell.slug] = result_of(cell, summary, line.error if line else None, line.commit if line else None)
    lost = [line for line in lines if line.summary and identity_of(line, added, keys) not in known]
    gone = [line.name for line in lost if read_summary(folder / "runs" / line.cell) is None]
    if gone:
        raise ValueError(
            f"{str(folder / FILE)!r} has finished cells without a run folder that are not in the study "
            f"({len(gone)}, such as {gone[0]!r}): choose another folder with --out, or remove their lines"
        )
    return results


def train_words(cell: Cell, home: Path) -> list[str]:
    """Arguments of `conadv` for a cell: start a run, or resume one that was stopped."""
    if (home / "config.toml").exists():
        return ["train", "--quiet", "--resume", str(home)]
    for partial in home.glob(".config.toml*.partial"):  # left by a run that was killed while starting
        partial.unlink()
    return ["train", cell.recipe, *flags({**_CHECKPOINTS, **cell.overrides}), "--quiet", "--run-dir", str(home)]


def start(command: list[str], log: Path, cores: frozenset[int], threads: int, nice: int) -> subprocess.Popen[bytes]:
    """Start a process on some cores, with its output in a file. It dies with this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)  # what a link points to would be written over
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        os.nice(nice)
        if sys.platform == "linux":
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
            preexec_fn=prepare,
        )


def _run_missing(
    study: Study, folder: Path, results: dict[str, Result], jobs: int | None, nice: int, request: StopRequest,
    tell: Tell,
) -> None:  # fmt: skip
    """Run all cells without a summary, and rewrite results.jsonl whenever one has ended."""
    waiting = [cell for cell in study.cells if results[cell.slug].summary is None]
    commit = record_origin(folder) if waiting else None
    threads = max(int(cell.values["threads"] or 1) for cell in study.cells)
    cores = usable_cores()
    jobs = jobs or max(1, len(cores) // threads)
    free = [frozenset(cores[(job * threads + n) % len(cores)] for n in range(threads)) for job in range(jobs)]
    running: list[Running] = []
    for cell in study.cells:
        _tidy(study, folder, results[cell.slug])
    write_results(folder, results.values())
    tell(f"{len(results)} cells, {jobs} at a time, {len(results) - len(waiting)} are already done")
    while waiting or running:
        if request.signal:
            for one in running:
                one.process.send_signal(signal.SIGTERM)
            for one in running:
                one.process.wait()
            raise Interrupted(request.signal)
        while waiting and free:
            cell, own = waiting.pop(0), free.pop(0)
            words = [sys.executable, "-m", "conadv", *train_words(cell, folder / "runs" / cell.slug)]
            process = start(words, _log(folder, cell), own, int(cell.values["threads"] or 1), nice)
            running.append(Running(cell, process, own, time.monotonic()))
        ended = [one for one in running if one.process.poll() is not None]
        running = [one for one in running if one not in ended]
        for one in ended:
            free.append(one.cores)
            error = _error_line(_log(folder, one.cell), one.process.returncode)
            result = result_of(one.cell, read_summary(folder / "runs" / one.cell.slug), error, commit)
            results[one.cell.slug] = result
            _tidy(study, folder, result)
            write_results(folder, results.values())
            left = [results[other.slug] for other in [*waiting, *(other.cell for other in running)]]
            tell(_told(result, time.monotonic() - one.began, list(results.values()), left, jobs))
        if not ended:
            time.sleep(_POLL_SECONDS)


def _told(result: Result, seconds: float, results: list[Result], left: list[Result], jobs: int) -> str:
    """One line about a cell that has ended, with the time left by the last run of each arm."""
    outcome = f"failed: {result.error}"
    if result.summary is not None:
        accuracy = result.summary.get("test_top1")
        outcome = f"{accuracy:.2f} %" if isinstance(accuracy, float) else "done"
    text = f"[{len(results) - len(left)}/{len(results)}] {result.name}: {outcome} ({duration(seconds)})"
    times = {one.arm: float(one.summary.get("seconds") or 0.0) for one in results if one.summary}
    if not left or not times:
        return text
    work = sum(times.get(one.arm, fmean(times.values())) for one in left)
    return f"{text}, about {duration(work / min(jobs, len(left)))} left"


def _tidy(study: Study, folder: Path, result: Result) -> None:
    """Remove the checkpoints of a finished run, unless the study keeps them."""
    if not study.keep_checkpoints and result.summary is not None:
        shutil.rmtree(folder / "runs" / result.cell / "checkpoints", ignore_errors=True)


def _log(folder: Path, cell: Cell) -> Path:
    return folder / "logs" / f"{cell.slug}.txt"


def _error_line(log: Path, status: int) -> str:
    """The last error message of a failed cell."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return last_error(log.read_text(encoding="utf-8", errors="replace"), f"exit status {status}")


def _check_runs(study: Study, folder: Path, resolve: Resolve) -> None:
    """Refuse run folders whose recipe differs from the study's: the study or its recipe may have changed."""
    for cell in study.cells:
        home = folder / "runs" / cell.slug
        if not (home / "config.toml").exists():
            continue
        try:
            there = resolve(str(home / "config.toml"), {})
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
