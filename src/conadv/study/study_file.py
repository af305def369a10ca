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
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conadv.catalog import is_callable, names_dataset
from conadv.config import Recipe, flatten, load_recipe, read_toml
from conadv.config.fields import did_you_mean, show

from .results import Cell

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
    grids: list[str]


def read_study(path: Path) -> Study:
    """Read and check a study file; anything wrong with it is a ValueError of one line."""
    try:
        text, tables = read_toml(path)
        _check_names(tables, [*_TOP, *_TABLES], "a study")
        for key, kind in _TOP.items():
            if type(tables.get(key, kind())) is not kind:
                allowed = "a text" if kind is str else "true or false"
                raise ValueError(f"{key} is {show(tables[key])} but must be {allowed}")
        base = _flat(tables.get("base", {}), "base")
        recipe = base.pop("recipe", None)
        if recipe is not None and (path.parent / recipe).is_file():
            recipe = str(path.parent / recipe)
        cells = _expand(recipe, base, _arms(tables.get("arm", [])), _grids(tables.get("grid", {})))
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


def identity_of(cell: Cell) -> str:
    """The values that affect the results of a cell, as one text; empty if it set a field that recipes do not have.

    A result of a version without some fields stands for their defaults.
    """
    defaults = flatten(Recipe())
    if any(key not in defaults and key not in NUMBERLESS for key in cell.overrides):
        return ""
    values = {key: cell.values.get(key, default) for key, default in defaults.items() if key not in NUMBERLESS}
    return json.dumps(values, sort_keys=True)


def _expand(
    recipe: str | None, base: dict[str, str], arms: Sequence[_Arm], grids: Mapping[str, Axes]
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
            cell = _cell(recipe, {**base, **arm.overrides, **chosen}, chosen, arm.name, grid)
            first = found.setdefault((cell.arm, identity_of(cell)), cell)
            if grid not in first.grids:
                first.grids.append(grid)
    ((folder, times),) = Counter(cell.cell for cell in found.values()).most_common(1)
    if times > 1:
        raise ValueError(f"two cells would share the folder {folder}: give their arms names that differ in letters")
    return tuple(found.values())


def _cell(recipe: str | None, overrides: dict[str, str], axes: dict[str, str], arm: str, grid: str) -> Cell:
    model, data = overrides.get("model", ""), overrides.get("data.path", "")
    if is_callable(model):
        advice = "use a built-in model, or one of timm or torchvision"
        raise ValueError(f"model {model!r} would import code, which a study file may not do: {advice}")
    if names_dataset(data):
        raise ValueError(f"data.path {data!r} would import code, which a study file may not do: save the data as files")
    overrides.setdefault("threads", "1")
    if recipe is None and not data:
        recipe = "digits"  # your own data has the defaults of `conadv train`
    values = flatten(load_recipe(recipe, overrides))
    arm = arm or str(values["method"])
    axes = {key: value for key, value in axes.items() if (key, value) != ("method", arm)}
    words = _slug("-".join([arm, *(f"{short(key)}{value}" for key, value in axes.items())]))
    # A hash of the overrides, so that a changed study does not reuse the old cells.
    numbers = {key: text for key, text in overrides.items() if key not in NUMBERLESS}
    digest = hashlib.sha256(json.dumps([Path(recipe or "").name, numbers], sort_keys=True).encode()).hexdigest()
    return Cell(
        cell=f"{words[:_LONGEST_WORDS]}-{digest[:6]}",
        name=" · ".join([arm, *(f"{short(key)} {value}" for key, value in axes.items())]),
        arm=arm,
        grids=[grid],
        axes=axes,
        overrides=overrides,
        values=values,
        command=shlex.join(["conadv", "train", *([] if recipe is None else [recipe]), *flags(overrides)]),
    )


# The tables of the file


def _grids(tables: object) -> dict[str, Axes]:
    """The grids by name."""
    if isinstance(tables, dict):
        return {"main": _axes(tables, "grid")}
    named = _named(tables, "grid")
    ((name, times),) = Counter([name for name, _ in named] or ["main"]).most_common(1)
    if times > 1:
        raise ValueError(f"two grids have the same name ({name}): rename one")
    return {name: _axes(table, f"grid {name}") for name, table in named} or {"main": {}}


def _arms(tables: object) -> list[_Arm]:
    """The arms. Two may have the same name, so that an arm can have different grids."""
    arms = []
    for name, table in _named(tables, "arm"):
        axes, grids = _axes(table.pop("grid", {}), f"arm {name}: grid"), table.pop("grids", [])
        if not isinstance(grids, list) or not all(isinstance(grid, str) for grid in grids):
            raise ValueError(f"arm {name}: grids is {show(grids)} but must be a list of names of grids")
        arms.append(_Arm(name, _flat(table, f"arm {name}"), axes, grids))
    return arms or [_Arm("", {}, {}, [])]


def _named(tables: object, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The name and the rest of each table of [[arm]] or [[grid]]."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{kind} is {show(tables)} but must be tables: write [[{kind}]] and its keys below it")
    for number, table in enumerate(tables, 1):
        if not isinstance(name := table.get("name"), str) or not _slug(name):
            raise ValueError(f'{kind} {number} needs a name: write name = "final"')
    return [(table["name"], {key: table[key] for key in table if key != "name"}) for table in tables]


def _axes(table: object, place: str) -> Axes:
    axes = {}
    for key, values in _leaves(table, place):
        if not isinstance(values, list) or not values:
            raise ValueError(f"{place}: {key} is {show(values)} but must be a list of values, such as [0, 1, 2]")
        axes[key] = [_as_text(value, f"{place}: {key}") for value in values]
    return axes


def _flat(table: object, place: str) -> dict[str, str]:
    return {key: _as_text(value, f"{place}: {key}") for key, value in _leaves(table, place)}


def _leaves(table: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield values by dotted key: optimizer.lr = 1, "optimizer.lr" = 1 and a table [base.optimizer] are the same."""
    if not isinstance(table, dict):
        raise ValueError(f"{place} is {show(table)} but must be a table: write [{place}] and its keys below it")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value, f"{place}.{key}"))
        else:
            yield key, value


def _as_text(value: object, place: str) -> str:
    """The value as the string of a flag."""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{place} is {show(value)} but must be a number, a text, true or false")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_names(given: Iterable[str], known: Sequence[str], place: str) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ValueError(f"{place} has no {name!r}{hint}")


def _slug(text: str) -> str:
    """A safe file name: 4/255 becomes 4-255."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
