"""results.jsonl: one line per cell, in the order of the study."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from conadv.core.catalog import METHODS
from conadv.readable import for_json
from conadv.trainer.files import read_text, write_atomically

from .study_file import Cell, flags

FILE = "results.jsonl"
GALLERY = "gallery.json"
_LARGEST_NUMBER = 1e18
_NOT_NEEDED = "remove it; a report works without it"
Known = TypeVar("Known")
Nested = dict[str, dict[str, Known]]


@dataclass(frozen=True)
class Result:
    """What is known about a cell. Without a summary and an error, it has not finished yet."""

    cell: str
    """Name of its folder below runs/."""
    name: str
    arm: str
    grids: list[str]
    axes: dict[str, str]
    overrides: dict[str, str]
    values: dict[str, Any]
    """The whole recipe, by dotted key."""
    summary: dict[str, Any] | None
    error: str | None
    command: str
    """The command that repeats the cell."""
    commit: str | None = None
    """The commit of the code at the end of the run; None: unknown, or the run has not ended."""

    def metric(self, name: str) -> float | None:
        """A number of the summary; None if it is missing or was not finite."""
        value = (self.summary or {}).get(name)
        return float(value) if isinstance(value, int | float) else None


def result_of(cell: Cell, summary: dict[str, Any] | None, error: str | None, commit: str | None = None) -> Result:
    """What is known about a cell; `error` is kept only without a summary."""
    command = shlex.join(["conadv", "train", cell.recipe, *flags(cell.overrides)])
    known = (cell.slug, cell.name, cell.arm, list(cell.grids), cell.axes, cell.overrides, dict(cell.values))
    return Result(*known, summary, error if summary is None else None, command, commit)


def write_results(folder: Path, results: Iterable[Result]) -> None:
    """Replace results.jsonl."""
    write_atomically(folder / FILE, "".join(json.dumps(asdict(result)) + "\n" for result in results))


def read_results(folder: Path) -> list[Result]:
    """Read and check results.jsonl; anything wrong with it is a ValueError of one line."""
    path = folder / FILE
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        raise ValueError(f"{str(folder)!r} is not a study (no {FILE}): pass a folder written by conadv sweep") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {str(path)!r} ({error}): pass a folder written by conadv sweep") from None
    return [_parse(line, f"line {number} of {str(path)!r}") for number, line in enumerate(lines, 1)]


def parse_json(text: str) -> Any:
    """Parse JSON from a file that may be damaged: NaN, infinity and deep nesting are a ValueError too."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None


def read_saved(path: Path, check: Callable[[Any], Known], missing: Known, advice: str = _NOT_NEEDED) -> Known:
    """Read a JSON file that a report can do without; `check` turns its content into what is returned.

    Any error of `check` means that the file is damaged, which is a ValueError that ends in `advice`.
    """
    try:
        return check(parse_json(read_text(path)))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): {advice}") from None


def keep(path: Path, found: Nested[Known], check: Callable[[Any], Nested[Known]]) -> Nested[Known]:
    """Save what was found in the folders of the runs, and what an earlier report saved from folders that are gone."""
    saved: Nested[Known] = read_saved(path, check, {})
    known = {key: {**saved.get(key, {}), **found.get(key, {})} for key in {**saved, **found}}
    if found:
        with suppress(OSError):
            write_atomically(path, json.dumps(known) + "\n")
    return known


def last_error(text: str, otherwise: str = "") -> str:
    """The last error message in the output of a command, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [otherwise])[-1]


def is_text(value: object) -> bool:
    """Whether a parsed value is a string that can be written as UTF-8."""
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode("utf-8")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a parsed value is a finite number, of at most 1e18."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def fits(value: object, hint: Any) -> bool:
    """Whether a parsed value has this type: str, float, list[...], tuple[...], dict[str, ...] or a union.

    Any is a scalar. A string must be valid UTF-8, and a number finite.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if kind is dict:
        return isinstance(value, dict) and all(is_text(key) and fits(item, parts[1]) for key, item in value.items())
    if kind is list:
        return isinstance(value, list) and all(fits(item, parts[0]) for item in value)
    if kind is tuple:
        return isinstance(value, list) and len(value) == len(parts) and all(map(fits, value, parts))
    if hint is Any:
        parts = (str, float, bool, NoneType)
    if parts:
        return any(fits(value, part) for part in parts)
    return is_text(value) if hint is str else is_number(value) if hint is float else isinstance(value, hint)


def _is_right(name: str, value: Any) -> bool:
    """Whether a parsed field has its type; values must have at least the settings that a report needs."""
    if not fits(value, _FIELDS[name]):
        return False
    if name == "cell":
        return Path(value).name == value and "\0" not in value
    if name == "values":
        whole = all(type(value.get(key)) is int for key in ("seed", "batch_size", "chunk_size", "delay"))
        numbers = all(is_number(value.get(key)) for key in ("optimizer.lr", "attack.epsilon"))
        # Older files do not have these.
        later = is_number(value.get("twin_share", 1)) and type(value.get("attack.steps", 1)) is int
        return whole and numbers and later and isinstance(value.get("method"), str)
    return True


_FIELDS = get_type_hints(Result)


def _parse(line: str, place: str) -> Result:
    try:
        entry = parse_json(line)
        if isinstance(entry, dict):
            entry = {"commit": None} | entry  # older files do not have it
        if not isinstance(entry, dict) or entry.keys() != _FIELDS.keys():
            raise ValueError("not the fields of a cell")
        wrong = [name for name in _FIELDS if not _is_right(name, entry[name])]
        if wrong:
            raise ValueError(f"bad value of {wrong[0]!r}")
    except ValueError as error:
        advice = "remove it, and conadv sweep reads or runs its cell again"
        raise ValueError(f"{place} is damaged ({error}): {advice}") from None
    return Result(**entry)


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


# Which run represents an arm in pictures.


Member = TypeVar("Member", Cell, Result)


def is_tuning(member: Cell | Result) -> bool:
    """Whether a cell only tunes the learning rate: the names of all its grids start with "tun"."""
    return all(map(is_tuning_grid, member.grids))


def is_tuning_grid(name: str) -> bool:
    return name.lower().startswith("tun")


def showcase(members: Iterable[Member]) -> dict[str, Member]:
    """The cell that represents each arm: the first that does not only tune, else the first."""
    chosen: dict[str, Member] = {}
    for member in members:
        if member.arm not in chosen or (is_tuning(chosen[member.arm]) and not is_tuning(member)):
            chosen[member.arm] = member
    return chosen


def without_pictures(folder: Path) -> list[Result]:
    """The runs whose gallery is missing and can be made, because they still have a checkpoint."""
    return [
        result
        for result in showcase(read_results(folder)).values()
        if result.summary is not None
        and _has_twins(result)
        and result.values["attack.epsilon"] > 0
        and not (folder / "runs" / result.cell / GALLERY).exists()
        and any((folder / "runs" / result.cell / "checkpoints").glob("step-*"))
    ]


def _has_twins(result: Result) -> bool:
    method = METHODS.get(result.values["method"])
    return method is not None and method.maker is not None
