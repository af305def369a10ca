"""results.jsonl: one line a cell, in the order of the study."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conadv.train.files import write_atomically

from .cells import Cell, flags

FILE = "results.jsonl"


@dataclass(frozen=True)
class Result:
    """What is known of a cell. Without summary and error it has not been run to its end yet."""

    cell: str
    """The name of its folder below runs/."""
    name: str
    arm: str
    grids: list[str]
    axes: dict[str, str]
    overrides: dict[str, str]
    values: dict[str, Any]
    summary: dict[str, Any] | None
    error: str | None
    command: str
    """Repeats the cell."""


def result_of(cell: Cell, folder: Path, error: str | None) -> Result:
    """The result in the folder of a cell; an error counts only where there is none."""
    summary = read_summary(folder)
    return Result(
        cell=cell.slug,
        name=cell.name,
        arm=cell.arm,
        grids=list(cell.grids),
        axes=cell.axes,
        overrides=cell.overrides,
        values=dict(cell.values),
        summary=summary,
        error=error if summary is None else None,
        command=shlex.join(["conadv", "train", cell.recipe, *flags(cell.overrides)]),
    )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The figures of a run that has come to its end."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    # JSON has no word for numbers that are not finite.
    return {key: None if _is_odd(value) else value for key, value in summary.items()}


def write_results(folder: Path, results: Iterable[Result]) -> None:
    write_atomically(folder / FILE, "".join(json.dumps(asdict(result)) + "\n" for result in results))


def read_results(folder: Path) -> list[Result]:
    """The results of a study; ValueError where the file is not what a sweep writes."""
    path = folder / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [_parse(json.loads(line)) for line in lines]
    except FileNotFoundError:
        raise ValueError(
            f"{str(folder)!r} is no study: it has no {FILE}; name a folder that conadv sweep wrote"
        ) from None
    except OSError as error:
        raise ValueError(f"{str(path)!r}: {error.strerror or error}; name a folder that conadv sweep wrote") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is not what conadv sweep writes ({error}): run the sweep again") from None


def _parse(line: Mapping[str, Any]) -> Result:
    return Result(**line)


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
