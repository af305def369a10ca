"""The folder of a run: config.toml, metrics.jsonl, checkpoints/, summary.json; made, claimed and found again."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .checkpoint import set_aside_newer, sweep_partial
from .files import write_atomically, writing


def versions() -> dict[str, str]:
    """What a result depends on beside the recipe."""
    return {"conadv": _version("conadv"), "torch": torch.__version__, "python": platform.python_version()}


def default_folder(parent: Path, name: str, config: str) -> Path:
    """The first free folder NAME-001, NAME-002, ...; when torchrun starts again, the last one, if it is this run's."""
    taken = sorted(parent.glob(f"{name}-[0-9][0-9][0-9]"))
    if taken and is_restart(taken[-1], config):
        return taken[-1]
    number = int(taken[-1].name.rpartition("-")[2]) + 1 if taken else 1
    return parent / f"{name}-{number:03d}"


def claim(folder: Path, config: str) -> None:
    """Make the folder of a new run; one that holds another run, or anything else, is left alone."""
    if (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} already holds a run: name another folder with --run, or go on with --resume {folder}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: name another one with --run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make {folder} ({error.strerror}): name another folder with --run") from None
    write_atomically(folder / "config.toml", config)


def reopen(folder: Path, config: str, step: int) -> None:
    """Go on in a folder from its checkpoint of `step`, with what may have changed in its recipe."""
    for partial in folder.glob(".*.partial"):
        with writing(folder):
            partial.unlink(missing_ok=True)
    sweep_partial(folder / "checkpoints")
    set_aside_newer(folder / "checkpoints", step)
    if _content(folder / "config.toml") != config:
        write_atomically(folder / "config.toml", config)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    write_atomically(folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def is_restart(folder: Path, config: str) -> bool:
    """Whether torchrun started this process again, after it or another one failed, and the folder is this run's."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and _content(folder / "config.toml") == config


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
