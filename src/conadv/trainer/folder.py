"""The folder of a run (config.toml, metrics.jsonl, checkpoints/, summary.json): create, lock and reopen it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from conadv.atomic import read_text, write_atomically, writing
from conadv.catalog import is_callable, names_dataset
from conadv.printing import for_json
from conadv.ranks.launch import launcher_command

from .checkpoint import checkpoints

_LOCK = "run.lock"
_PARTIAL_CONFIG = ".config.toml.*partial"


def default_folder(parent: Path, name: str, config: str, restarted: bool) -> Path:
    """Return the first free folder NAME-001, NAME-002, ...; after a restart by torchrun the last one, if it is ours."""
    taken = sorted(parent.glob(f"{name}-[0-9][0-9][0-9]"))
    if restarted and taken and holds(taken[-1], config):
        return taken[-1]
    number = int(taken[-1].name.rpartition("-")[2]) + 1 if taken else 1
    return parent / f"{name}-{number:03d}"


def resume_command(folder: Path, model: str, data: str | None) -> str:
    """Return the command that resumes a run."""
    # Code is only imported if the command line names it, never because a folder does.
    named = f" --model {shlex.quote(model)}" if is_callable(model) else ""
    named += f" --data.path {data}" if names_dataset(data or "") else ""
    return f"{launcher_command()}conadv train --resume {shlex.quote(str(folder))}{named}"


class RunFolder:
    """The folder of a run, locked while rank 0 trains, and removed if the run fails before its first checkpoint.

    `config` is the text of its config.toml. Unless it `is_new`, the run in it is resumed.
    """

    def __init__(self, path: Path, config: str, is_new: bool) -> None:
        self.path = path
        self.is_new = is_new
        self._config = config
        self._lock = FileLock(path / _LOCK, timeout=0, thread_local=False)
        self._created: list[Path] | None = None  # folders that we created, outermost first; None: not opened yet

    def open(self) -> None:
        """Create and lock the folder of a new run, or lock that of a run to resume, and write its recipe."""
        if self.is_new:
            self._claim()
        else:
            self._acquire()
        _sweep(self.path)
        if not holds(self.path, self._config):  # it is new, or was changed by flags
            write_atomically(self.path / "config.toml", self._config)

    def close(self, status: int = 0) -> None:
        """Unlock the folder; remove it if it is new, has no checkpoint, and the exit status is that of a failure."""
        failed = status == 2 or status > 128  # bad input, or a signal before the first step
        if failed and self._created is not None and not checkpoints(self.path / "checkpoints"):
            self._remove(self._created)
        self._lock.release()

    def _claim(self) -> None:
        """Create the folder, unless another process was faster."""
        _check_free(self.path)
        missing = [folder for folder in (*reversed(self.path.parents), self.path) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot make {self.path} ({error.strerror}): choose another folder with --run-dir"
            ) from None
        self._acquire()
        _check_free(self.path)
        self._created = missing

    def _acquire(self) -> None:
        """Lock the folder until this process ends; a ValueError names the process that has it."""
        path = self.path / _LOCK
        if path.is_symlink():  # what it points to would be written over
            raise ValueError(f"{path} is a symbolic link: remove it")
        with writing(path):
            try:
                self._lock.acquire()
            except Timeout:
                holder = read_text(path) or "another process"
                raise ValueError(
                    f"{self.path} is in use by {holder}: stop that run or wait for its end, then resume"
                ) from None
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")

    def _remove(self, created: list[Path]) -> None:
        """Remove our files, then the folders that we created, unless they contain something else."""
        with suppress(OSError):
            _sweep(self.path)
            for name in ("metrics.jsonl", "config.toml"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            (self.path / _LOCK).unlink()
            self._lock.release()
            for folder in reversed(created):
                folder.rmdir()


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_atomically(folder / "summary.json", json.dumps(for_json(summary), indent=1) + "\n")


def holds(folder: Path, config: str) -> bool:
    """Whether a folder contains the run with this config.toml."""
    try:
        return read_text(folder / "config.toml") == config
    except (OSError, ValueError):
        return False


def _check_free(folder: Path) -> None:
    """Refuse a folder that contains another run, or anything but what a run leaves that is killed at its start."""
    if (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} already holds a run: choose another folder (--run-dir, in Python folder=), or resume it "
            f"(--resume {folder}, in Python resume=)"
        )
    if not folder.exists():
        return
    if not folder.is_dir() or any(path.name != _LOCK and not path.match(_PARTIAL_CONFIG) for path in folder.iterdir()):
        raise ValueError(f"{folder} is not an empty folder: choose another one with --run-dir")


def _sweep(folder: Path) -> None:
    """Remove files that a killed run was writing."""
    for partial in (*folder.glob(".*.partial"), *folder.glob("checkpoints/.*.partial")):
        with writing(folder):
            partial.unlink(missing_ok=True)
