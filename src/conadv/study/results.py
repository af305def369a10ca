"""results.jsonl: one line per cell, in the order of the study. origin.json: where they were run."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any

from conadv import __version__
from conadv.atomic import read_text, write_atomically
from conadv.machine import processor
from conadv.printing import for_json

FILE, ORIGIN = "results.jsonl", "origin.json"
_LARGEST_NUMBER = 1e18
# The fields of a line, and their types.
_KINDS: dict[str, Any] = {
    "cell": str, "name": str, "arm": str, "grids": list, "axes": dict, "overrides": dict, "values": dict,
    "command": str, "summary": dict | NoneType, "error": str | NoneType, "commit": str | NoneType,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of a study, and what is known about it. Without a summary and an error, it has not finished yet."""

    cell: str
    """Name of its folder below runs/, unique among cells with different results."""
    name: str
    """A readable name: the arm and what the grids vary."""
    arm: str
    grids: list[str]
    """The grids that it belongs to; a single grid is called "main"."""
    axes: dict[str, str]
    """The values that the grids vary, by dotted key."""
    overrides: dict[str, str]
    """Everything that differs from the recipe, by dotted key, as strings for the flags of conadv train."""
    values: dict[str, Any]
    """The whole recipe, by dotted key."""
    command: str
    """The command that runs the cell."""
    summary: dict[str, Any] | None = None
    error: str | None = None
    commit: str | None = None
    """The commit of the code at the end of the run; None: unknown, or the run has not ended."""


def write_results(folder: Path, cells: Iterable[Cell]) -> None:
    """Replace results.jsonl."""
    write_atomically(folder / FILE, "".join(json.dumps(asdict(cell)) + "\n" for cell in cells))


def read_results(folder: Path) -> list[Cell]:
    """Read and check results.jsonl; anything wrong with it is a ValueError of one line."""
    path = folder / FILE
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        raise ValueError(f"{str(folder)!r} is not a study (no {FILE}): pass a folder written by conadv sweep") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r} ({error}): pass a folder written by conadv sweep") from None
    return [_parse(line, f"line {number} of {str(path)!r}") for number, line in enumerate(lines, 1)]


def read_summary(run: Path) -> dict[str, Any] | None:
    """The summary of a run; None if the run has not ended."""
    path = run / "summary.json"
    try:
        return for_json(json.loads(read_text(path)))  # older summaries may contain NaN
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ValueError(
            f"{str(path)!r} is damaged: remove the folder {run.name!r}, and its line in {FILE}, to run it again"
        ) from None


def number(value: object) -> float:
    """A number of a file; NaN for anything else, and for numbers beyond 1e18."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER
    return float(value) if known else math.nan  # type: ignore[arg-type]


def _parse(line: str, place: str) -> Cell:
    try:
        cell = Cell(**{"commit": None, **json.loads(line)})  # older files have no commits
        wrong = [name for name, kind in _KINDS.items() if not isinstance(getattr(cell, name), kind)]
        if wrong:
            raise ValueError(f"bad value of {wrong[0]!r}")
        if Path(cell.cell).name != cell.cell or "\0" in cell.cell:
            raise ValueError("not the name of a folder")
        if [type(cell.values.get(key)) for key in ("seed", "method")] != [int, str]:
            raise ValueError("no seed or no method")
        if not all(isinstance(grid, str) for grid in cell.grids):
            raise ValueError("grids are not names")
    except (TypeError, ValueError, RecursionError) as error:
        advice = "remove it, and conadv sweep reads or runs its cell again"
        raise ValueError(f"{place} is damaged ({error}): {advice}") from None
    return cell


# Where results come from


def record_origin(folder: Path) -> str | None:
    """Add this machine, its versions and our commit, which is returned, to origin.json, unless they are there."""
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
        write_atomically(folder / ORIGIN, json.dumps([*known, origin], indent=1) + "\n")
    return commit


def read_origins(folder: Path) -> list[dict[str, Any]]:
    """Read origin.json, oldest first; empty if there is no such file, and ValueError if it is damaged."""
    path = folder / ORIGIN
    try:
        origins = json.loads(read_text(path))
        if not isinstance(origins, list) or not all(isinstance(origin, dict) for origin in origins):
            raise ValueError("not a list of origins")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
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
