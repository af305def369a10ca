"""The folder of a run: config.toml, metrics.jsonl, checkpoints/, summary.json; made, claimed and found again."""

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
from conadv.core.catalog import is_callable
from conadv.parallel.launch import launcher_command

from .checkpoint import checkpoints, set_aside_newer, sweep_partial
from .files import read_text, write_atomically, writing
from .lock import FolderLock

_PARTIAL_CONFIG = ".config.toml.*partial"


def versions() -> dict[str, str]:
    """What a result depends on besides the recipe."""
    return {"conadv": __version__, "torch": torch.__version__, "python": platform.python_version()}


def default_folder(parent: Path, name: str, config: str, restarted: bool) -> Path:
    """The first free folder NAME-001, NAME-002, ...; when torchrun starts again, the last one, if it is this run's."""
    taken = sorted(parent.glob(f"{name}-[0-9][0-9][0-9]"))
    if restarted and taken and holds(taken[-1], config):
        return taken[-1]
    number = int(taken[-1].name.rpartition("-")[2]) + 1 if taken else 1
    return parent / f"{name}-{number:03d}"


def resume_command(folder: Path, model: str) -> str:
    """The command that resumes a run."""
    # A folder may not name code to import, so its command does.
    named = f" --model {shlex.quote(model)}" if is_callable(model) else ""
    return f"{launcher_command()}conadv train --resume {shlex.quote(str(folder))}{named}"


class RunFolder:
    """The folder of a run while rank 0 trains: locked, and removed again if the run fails before its first checkpoint.

    Args:
        path: The folder.
        config: The text of its config.toml.
        is_new: Whether the run starts here; otherwise it resumes from what is in the folder.
    """

    def __init__(self, path: Path, config: str, is_new: bool) -> None:
        self.path = path
        self.is_new = is_new
        self._config = config
        self._lock = FolderLock(path)
        self._made: list[Path] | None = None  # folders of our own making, outermost first; None: nothing is claimed

    def prepare(self) -> None:
        """Check that the run can be written here, before anything is: free if it is new, else locked from now on."""
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
        """Unlock the folder.

        After bad input (status 2) or a stop before the first step (that of a signal, above 128), a new run without a
        checkpoint leaves nothing behind.
        """
        if (status == 2 or status > 128) and self._made is not None and not checkpoints(self.path / "checkpoints"):
            self._remove(self._made)
        self._lock.release()

    def _claim(self) -> None:
        _check_free(self.path)
        missing = [folder for folder in (*reversed(self.path.parents), self.path) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make {self.path} ({error.strerror}): choose another folder with --run") from None
        self._lock.acquire()
        self._made = missing
        if (self.path / "config.toml").exists():  # by a process that was faster, and has ended since
            self._made = None
            _check_free(self.path)
        for left in self.path.glob(_PARTIAL_CONFIG):
            left.unlink(missing_ok=True)
        write_atomically(self.path / "config.toml", self._config)

    def _remove(self, made: list[Path]) -> None:
        """Our own files, then the folders that we made, unless something else is in them."""
        with suppress(OSError):
            for path in (*self.path.glob(".*.partial"), self.path / "metrics.jsonl", self.path / "config.toml"):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            self._lock.release()
            for folder in reversed(made):
                folder.rmdir()


def _is_of_a_start(path: Path) -> bool:
    """Whether a run that was killed before it had claimed its folder leaves such a file."""
    return path.name == "run.lock" or path.match(_PARTIAL_CONFIG)


def _check_free(folder: Path) -> None:
    """A folder that holds another run, or anything else, is left alone."""
    if (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} already holds a run: choose another folder (--run, in Python folder=), or resume it "
            f"(--resume {folder}, in Python resume=)"
        )
    if folder.exists() and (not folder.is_dir() or any(not _is_of_a_start(path) for path in folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: choose another one with --run")


def reopen(folder: Path, config: str, step: int) -> None:
    """Reopen a run folder at its checkpoint of `step`; its recipe may have changed where that is allowed."""
    for partial in folder.glob(".*.partial"):
        with writing(folder):
            partial.unlink(missing_ok=True)
    sweep_partial(folder / "checkpoints")
    set_aside_newer(folder / "checkpoints", step)
    if _content(folder / "config.toml") != config:
        write_atomically(folder / "config.toml", config)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def holds(folder: Path, config: str) -> bool:
    """Whether a folder is of the run with this config.toml."""
    return _content(folder / "config.toml") == config


def _content(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""
