"""The folder of a run (config.toml, metrics.jsonl, checkpoints/, summary.json): create, lock and reopen it."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from conadv import __version__
from conadv.catalog import is_callable, names_dataset
from conadv.ranks.launch import launcher_command
from conadv.readable import for_json

from .checkpoint import checkpoints, set_aside_newer, sweep_partial
from .files import read_text, write_atomically, writing
from .lock import FolderLock

_PARTIAL_CONFIG = ".config.toml.*partial"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"conadv": __version__, "torch": torch.__version__, "python": platform.python_version()}


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

    Args:
        path: The folder.
        config: The text of its config.toml.
        is_new: Whether to start a new run; otherwise the run in the folder is resumed.
    """

    def __init__(self, path: Path, config: str, is_new: bool) -> None:
        self.path = path
        self.is_new = is_new
        self._config = config
        self._lock = FolderLock(path)
        self._created: list[Path] | None = None  # folders that we created, outermost first; None: not opened yet

    def prepare(self) -> None:
        """Check that the folder of a new run is free, or lock that of a run to resume; writes nothing else."""
        if self.is_new:
            _check_free(self.path)
        else:
            self._lock.acquire()

    def open(self, step: int) -> None:
        """Create the folder of a new run, or reopen it at the checkpoint of `step`."""
        if self.is_new:
            self._claim()
        else:
            reopen(self.path, self._config, step)

    def close(self, status: int = 0) -> None:
        """Unlock the folder; remove it if it is new, has no checkpoint, and the run failed.

        Args:
            status: The exit status. It fails with 2 (bad input) or above 128 (a signal before the first step).
        """
        if (status == 2 or status > 128) and self._created is not None and not checkpoints(self.path / "checkpoints"):
            self._remove(self._created)
        self._lock.release()

    def _claim(self) -> None:
        _check_free(self.path)
        missing = [folder for folder in (*reversed(self.path.parents), self.path) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot make {self.path} ({error.strerror}): choose another folder with --run-dir"
            ) from None
        self._lock.acquire()
        self._created = missing
        if (self.path / "config.toml").exists():  # another process was faster, and has ended since
            self._created = None
            _check_free(self.path)
        for left in self.path.glob(_PARTIAL_CONFIG):
            left.unlink(missing_ok=True)
        write_atomically(self.path / "config.toml", self._config)

    def _remove(self, created: list[Path]) -> None:
        """Remove our files, then the folders that we created, unless they contain something else."""
        with suppress(OSError):
            for path in (*self.path.glob(".*.partial"), self.path / "metrics.jsonl", self.path / "config.toml"):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            self._lock.release()
            for folder in reversed(created):
                folder.rmdir()


def _is_leftover(path: Path) -> bool:
    """Whether a file may be from a run that was killed before it had written config.toml."""
    return path.name == "run.lock" or path.match(_PARTIAL_CONFIG)


def _check_free(folder: Path) -> None:
    """Refuse a folder that contains another run, or anything else."""
    if (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} already holds a run: choose another folder (--run-dir, in Python folder=), or resume it "
            f"(--resume {folder}, in Python resume=)"
        )
    if folder.exists() and (not folder.is_dir() or any(not _is_leftover(path) for path in folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: choose another one with --run-dir")


def reopen(folder: Path, config: str, step: int) -> None:
    """Reopen a run folder at its checkpoint of `step`, and write config.toml again if the recipe has changed."""
    for partial in folder.glob(".*.partial"):
        with writing(folder):
            partial.unlink(missing_ok=True)
    sweep_partial(folder / "checkpoints")
    set_aside_newer(folder / "checkpoints", step)
    if not holds(folder, config):
        write_atomically(folder / "config.toml", config)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_atomically(folder / "summary.json", json.dumps(for_json(summary), indent=1) + "\n")


def holds(folder: Path, config: str) -> bool:
    """Whether a folder contains the run with this config.toml."""
    try:
        return read_text(folder / "config.toml") == config
    except (OSError, ValueError):
        return False
