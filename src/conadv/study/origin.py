"""Where results come from: the machine, the versions, the commit and the day."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conadv.train.files import write_atomically

FILE = "origin.json"


def record_origin(folder: Path) -> None:
    """Note where a study is being run, once for each machine, version and commit that it was run with."""
    origin, known = _origin(), read_origins(folder)
    if not any({**earlier, "date": None} == {**origin, "date": None} for earlier in known):
        write_atomically(folder / FILE, json.dumps([*known, origin], indent=1) + "\n")


def read_origins(folder: Path) -> list[dict[str, Any]]:
    """Oldest first; empty where none was noted."""
    try:
        origins: list[dict[str, Any]] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return origins


def _origin() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {name: _version(name) for name in ("conadv", "torch", "numpy")}
        | {"python": platform.python_version()},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):  # a system that does not say
        return None


def _commit() -> str | None:
    """The commit of the clone that we run from, marked where its sources were changed since; None: no clone."""
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "--short=12", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
    return f"{commit} (sources changed since)" if commit and changed else commit


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
