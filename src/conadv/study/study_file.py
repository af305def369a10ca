"""Study files: TOML that describes many runs (cells), one for each combination of an arm and a grid point.

    title, about, conclusions texts for the report
    keep_checkpoints          true: keep the checkpoints of all cells
    [base]                    recipe = "digits", and values for all cells
    [[arm]]                   name = "delay 2", and values for the cells of this arm; without arms: one per method
    [arm.grid]                more axes for this arm only, or other values on a common axis
    [grid] or [[grid]]        common axes: one list per key; every combination is a cell; several grids need names

Later ones override earlier ones: base, arm, grid, arm.grid. An arm with `grids = ["final"]` is only in those grids.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from conadv.catalog import is_callable, names_dataset
from conadv.config import read_toml

Resolve = Callable[[str, Mapping[str, str]], Mapping[str, Any]]
"""Maps a recipe's name and overrides (strings by dotted key) to all values; ValueError if one is wrong."""

Axes = dict[str, list[str]]
"""Lists of values by dotted key; every combination of values is a point of the grid."""

# Fields that do not affect the results of a run: cells that differ only in these are the same cell.
# Results of earlier versions also have `diagnose`, `data.memory` and `checkpoint.minutes`.
NUMBERLESS = frozenset({
    "layout", "attackers", "log", "threads", "timeout", "eval_every", "diagnose", "data.workers", "data.memory",
    "checkpoint.every", "checkpoint.minutes", "checkpoint.keep",
})  # fmt: skip

_TOP = {"title": str, "about": str, "conclusions": str, "keep_checkpoints": bool}
_TABLES = ("base", "grid", "arm")
_MOST_CELLS = 100_000
_LONGEST_WORDS = 150  # file systems end names at 255 bytes


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    slug: str
    """Name of its folder; unique among cells with different results."""
    arm: str
    grids: tuple[str, ...]
    """The grids that it belongs to; a single grid is called "main"."""
    axes: dict[str, str]
    """The values that the grids vary, by dotted key."""
    recipe: str
    overrides: dict[str, str]
    """Everything that differs from the recipe, by dotted key, as strings for the flags of conadv train."""
    values: Mapping[str, Any]
    """The whole recipe, by dotted key."""

    @property
    def name(self) -> str:
        """A readable name: the arm and what the grids vary."""
        return " · ".join([self.arm, *(f"{short(key)} {value}" for key, value in self.axes.items())])


@dataclass(frozen=True)
class Study:
    """A study file, read and checked."""

    text: str
    title: str
    keep_checkpoints: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class _Arm:
    """An arm of a study: its name (empty: that of the method), overrides, own axes, and its grids (empty: all)."""

    name: str
    overrides: dict[str, str]
    axes: Axes
    grids: tuple[str, ...]


def read_study(path: Path, resolve: Resolve) -> Study:
    """Read and check a study file; anything wrong with it is a ValueError of one line."""
    try:
        text, tables = read_toml(path)
        _check_names(tables, [*_TOP, *_TABLES], "a study")
        for key, kind in _TOP.items():
            if type(tables.get(key, kind())) is not kind:
                allowed = "a text" if kind is str else "true or false"
                raise ValueError(f"{key} is {_shown(tables[key])} but must be {allowed}")
        overrides = _flat(tables.get("base", {}), "base")
        recipe = overrides.pop("recipe", "digits")
        if (path.parent / recipe).is_file():
            recipe = str(path.parent / recipe)
        cells = _expand(recipe, overrides, _arms(tables.get("arm", [])), _grids(tables.get("grid", {})), resolve)
        return Study(text, tables.get("title") or path.stem, tables.get("keep_checkpoints", False), cells)
    except FileNotFoundError:
        raise ValueError(f"study {str(path)!r}: no such file; pass a TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"study {str(path)!r}: {' '.join(str(error).split())}") from None


def flags(overrides: Mapping[str, object]) -> list[str]:
    """Overrides as command-line arguments."""
    return [word for key, value in overrides.items() for word in ("--" + key.replace("_", "-"), str(value))]


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def identity_of(member: Any, added: Mapping[str, Any], keys: Iterable[str]) -> str:
    """The values that affect the results of a cell or of a stored result, as one text; empty if it set another field.

    Args:
        member: a `Cell`, or a `Result` of this or of another version.
        added: fields that were added later, with the values that older results stand for.
        keys: the fields of today's recipes.
    """
    keys = [key for key in keys if key not in NUMBERLESS]
    if any(key not in keys and key not in NUMBERLESS for key in member.overrides):
        return ""
    values = {**added, **member.values}
    return json.dumps({key: values.get(key) for key in keys}, sort_keys=True)


def _expand(
    recipe: str, base: dict[str, str], arms: Sequence[_Arm], grids: Mapping[str, Axes], resolve: Resolve
) -> tuple[Cell, ...]:
    """All cells, grid by grid and arm by arm. A cell that several grids contain is listed once, with all its grids."""
    for arm in arms:
        _check_names(arm.grids, list(grids), f"arm {arm.name}: the list of grids")
    pairs = [(grid, arm) for grid in grids for arm in arms if not arm.grids or grid in arm.grids]
    parts = [(grid, arm, {**grids[grid], **arm.axes}) for grid, arm in pairs]
    count = sum(math.prod(map(len, axes.values())) for _, _, axes in parts)
    if not 0 < count <= _MOST_CELLS:
        raise ValueError(f"{count} cells, but a study has from 1 to {_MOST_CELLS}: shorten its lists")
    found: dict[tuple[str, str], Cell] = {}
    for grid, arm, axes in parts:
        for point in itertools.product(*axes.values()):
            chosen = dict(zip(axes, point, strict=True))
            cell = _cell(recipe, {**base, **arm.overrides, **chosen}, chosen, arm.name, grid, resolve)
            identity = (cell.arm, identity_of(cell, {}, cell.values))
            first = found.setdefault(identity, cell)
            if grid not in first.grids:
                found[identity] = replace(first, grids=(*first.grids, grid))
    ((slug, times),) = Counter(cell.slug for cell in found.values()).most_common(1)
    if times > 1:
        raise ValueError(f"two cells would share the folder {slug}: give their arms names that differ in letters")
    return tuple(found.values())


def _cell(recipe: str, overrides: dict[str, str], axes: dict[str, str], arm: str, grid: str, resolve: Resolve) -> Cell:
    model, data = overrides.get("model", ""), overrides.get("data.path", "")
    if is_callable(model):
        advice = "use a built-in model, or one of timm or torchvision"
        raise ValueError(f"model {model!r} would import code, which a study file may not do: {advice}")
    if names_dataset(data):
        raise ValueError(f"data.path {data!r} would import code, which a study file may not do: save the data as files")
    overrides.setdefault("threads", "1")
    values = resolve(recipe, overrides)
    arm = arm or str(values["method"])
    axes = {key: value for key, value in axes.items() if (key, value) != ("method", arm)}
    words = _slug("-".join([arm, *(f"{short(key)}{value}" for key, value in axes.items())]))
    # A hash of the overrides, so that a changed study does not reuse the old cells.
    numbers = {key: text for key, text in overrides.items() if key not in NUMBERLESS}
    digest = hashlib.sha256(json.dumps([Path(recipe).name, numbers], sort_keys=True).encode()).hexdigest()
    return Cell(f"{words[:_LONGEST_WORDS]}-{digest[:6]}", arm, (grid,), axes, recipe, overrides, values)


# The tables of the file


def _grids(tables: object) -> dict[str, Axes]:
    """The grids by name."""
    if isinstance(tables, dict):
        return {"main": _axes(tables, "grid")}
    grids: dict[str, Axes] = {}
    for number, axes in enumerate(_list_of_tables(tables, "grid"), 1):
        name = axes.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f'grid {number} of several needs a name: write name = "tuning"')
        if name in grids:
            raise ValueError(f"two grids have the same name ({name}): rename one")
        grids[name] = _axes(axes, f"grid {name}")
    return grids or {"main": {}}


def _arms(tables: object) -> list[_Arm]:
    """Parse the arms. Two may have the same name, so that an arm can have different grids."""
    arms = []
    for number, entries in enumerate(_list_of_tables(tables, "arm"), 1):
        name = entries.pop("name", None)
        if not isinstance(name, str) or not _slug(name):
            raise ValueError(f'arm {number} needs a name: write name = "vanilla"')
        axes, grids = _axes(entries.pop("grid", {}), f"arm {name}: grid"), entries.pop("grids", [])
        if not isinstance(grids, list) or not all(isinstance(grid, str) for grid in grids):
            raise ValueError(f"arm {name}: grids is {_shown(grids)} but must be a list of names of grids")
        arms.append(_Arm(name, _flat(entries, f"arm {name}"), axes, tuple(grids)))
    return arms or [_Arm("", {}, {}, ())]


def _list_of_tables(tables: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} is {_shown(tables)} but must be tables: write [[{name}]] and its keys below it")
    return [dict(table) for table in tables]


def _axes(table: object, place: str) -> Axes:
    axes = {}
    for key, values in _leaves(table, place):
        if not isinstance(values, list) or not values:
            raise ValueError(f"{place}: {key} is {_shown(values)} but must be a list of values, such as [0, 1, 2]")
        axes[key] = [_as_text(value, f"{place}: {key}") for value in values]
    return axes


def _flat(table: object, place: str) -> dict[str, str]:
    return {key: _as_text(value, f"{place}: {key}") for key, value in _leaves(table, place)}


def _leaves(table: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield values by dotted key: optimizer.lr = 1, "optimizer.lr" = 1 and a table [base.optimizer] are the same."""
    if not isinstance(table, dict):
        raise ValueError(f"{place} is {_shown(table)} but must be a table: write [{place}] and its keys below it")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value, f"{place}.{key}"))
        else:
            yield key, value


def _as_text(value: object, place: str) -> str:
    """The value as the string of a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise ValueError(f"{place} is {_shown(value)} but must be a number, a text, true or false")
    return str(value)


def _check_names(given: Iterable[str], known: Sequence[str], place: str) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise ValueError(f"{place} has no {name!r}{hint}")


def _shown(value: object) -> str:
    return f"{value!r:.60}"


def _slug(text: str) -> str:
    """A safe file name: 4/255 becomes 4-255."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
