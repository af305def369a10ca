"""origin.json: the machines, versions, commits and dates of the results of a study."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conadv import __version__
from conadv.machine import processor
from conadv.trainer.files import read_text, write_atomically

from .results import parse_json

FILE = "origin.json"


def record_origin(folder: Path) -> str | None:
    """Add this machine, its versions and our commit to origin.json, unless they are already there.

    Returns:
        The commit; None if the code is not in a Git clone.
    """
    try:
        known = read_origins(folder)
    except ValueError:
        known = []  # a damaged file is replaced
    commit = _commit()
    origin = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), "conadv": __version__, "torch": version("torch")},
        "commit": commit,
    }
    if not any({**earlier, "date": None} == {**origin, "date": None} for earlier in known):
        write_atomically(folder / FILE, json.dumps([*known, origin], indent=1) + "\n")
    return commit


def read_origins(folder: Path) -> list[dict[str, Any]]:
    """Read origin.json, oldest first; empty if there is no such file, and ValueError if it is damaged."""
    path = folder / FILE
    try:
        origins = parse_json(read_text(path))
        if not isinstance(origins, list) or not all(isinstance(origin, dict) for origin in origins):
            raise ValueError("not a list of origins")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): remove it; a report works without it") from None
    return origins


def _commit() -> str | None:
    """The commit of the clone with this code, marked if its sources have changed; None: not a clone."""
    here = Path(__file__).parent
    status = ("status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), status)
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit} (sources changed since)" if changed else commit
