"""A study: a TOML file that names many runs, and the cells that it expands to.

    [base]                    recipe = "digits", and values for every cell
    [[arm]]                   name = "delay 2", and values for the cells of this arm; none: one arm for each method
    [arm.grid]                further axes of this arm alone, or other values on a common axis
    [grid] or [[grid]]        common axes: a list for each key, and every combination is a cell; several have a name

A later one wins: base, arm, grid, arm.grid. An arm with `grids = ["final"]` takes part in those grids alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

Scalar = int | float | str | bool
Overrides = Mapping[str, str]
Resolve = Callable[[str, Overrides], Mapping[str, Any]]
"""From a recipe's name and changes by dotted key, as texts, to all values of the recipe; ValueError if one is wrong."""

# Fields that change no number of a run: cells that differ in nothing else are the same cell.
NUMBERLESS = frozenset({
    "layout", "threads", "timeout", "eval_every", "data.workers",
    "checkpoint.every", "checkpoint.minutes", "checkpoint.keep",
})  # fmt: skip

_TOP = ("title", "about", "keep_checkpoints", "base", "grid", "arm")
_MOST_CELLS = 100_000
_LARGEST_FILE = 1_000_000


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    slug: str
    """The name of its folder: readable, and unlike that of any cell with other numbers."""
    arm: str
    grids: tuple[str, ...]
    """The grids that it belongs to; the one of a study with a single grid is called "main"."""
    axes: dict[str, str]
    """What the grids vary, by dotted key."""
    recipe: str
    overrides: dict[str, str]
    """All that differs from the recipe, by dotted key, as the flags of conadv train write it."""
    values: Mapping[str, Any]
    """The whole recipe, by dotted key."""

    @property
    def name(self) -> str:
        """For people: the arm and what the grids vary."""
        return " · ".join([self.arm, *(f"{short(key)} {value}" for key, value in self.axes.items())])


@dataclass(frozen=True)
class Study:
    """A study file, read and checked."""

    path: Path
    text: str
    title: str
    about: str
    keep_checkpoints: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class _Grid:
    name: str
    axes: dict[str, list[str]]


@dataclass(frozen=True)
class _Arm:
    name: str
    overrides: dict[str, str]
    axes: dict[str, list[str]]
    grids: tuple[str, ...]
    """Empty: all."""


def read_study(path: Path, resolve: Resolve) -> Study:
    """The study in a file; whatever is wrong with it is a ValueError of one line."""
    text = _text(path)
    try:
        tables = tomllib.loads(text)
        _known(tables, _TOP, "a study")
        recipe, base = _base(tables.get("base", {}), path.parent)
        grids, arms = _grids(tables.get("grid", {})), _arms(tables.get("arm", []))
        _check_grid_names(arms, grids)
        cells = tuple(_unique(_cells(recipe, base, arms, grids, resolve)))
        return Study(
            path,
            text,
            _typed(tables, "title", str, path.stem),
            _typed(tables, "about", str, ""),
            _typed(tables, "keep_checkpoints", bool, False),
            cells,
        )
    except RecursionError:
        raise ValueError(f"study {str(path)!r}: brackets in brackets without end") from None
    except ValueError as error:
        raise ValueError(f"study {str(path)!r}: {' '.join(str(error).split())}") from None


def flags(overrides: Overrides) -> list[str]:
    """Changes to a recipe as words of a command line."""
    return [word for key, text in overrides.items() for word in ("--" + key.replace("_", "-"), text)]


def short(key: str) -> str:
    """The last part of a dotted key: what people call it."""
    return key.rpartition(".")[2]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ValueError(f"study {str(path)!r}: larger than {_LARGEST_FILE} bytes, so no study; name a TOML file")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"study {str(path)!r}: {error.strerror or error}; name a TOML file") from None
    except UnicodeDecodeError:
        raise ValueError(f"study {str(path)!r}: not a text in UTF-8, so no study; name a TOML file") from None


def _base(table: object, folder: Path) -> tuple[str, dict[str, str]]:
    """The recipe, by name or by its path beside the study, and the values for every cell."""
    overrides = _flat(table, "base")
    recipe = overrides.pop("recipe", "digits")
    beside = folder / recipe
    return (str(beside) if beside.is_file() else recipe), overrides


def _grids(tables: object) -> list[_Grid]:
    if isinstance(tables, dict):
        return [_Grid("main", _axes(tables, "grid"))]
    grids = []
    for number, table in enumerate(_list_of_tables(tables, "grid"), 1):
        axes = dict(table)
        name = axes.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f'grid {number} of several needs a name: write name = "tuning"')
        grids.append(_Grid(name, _axes(axes, f"grid {name}")))
    names = [grid.name for grid in grids]
    if len(set(names)) < len(names):
        raise ValueError(f"two grids have one name among {', '.join(names)}: rename one")
    return grids or [_Grid("main", {})]


def _arms(tables: object) -> list[_Arm]:
    """Two arms may share a name, so that an arm can have another grid in one part of a study."""
    arms = []
    for number, table in enumerate(_list_of_tables(tables, "arm"), 1):
        entries = dict(table)
        name = entries.pop("name", None)
        if not isinstance(name, str) or not _slugged(name):
            raise ValueError(f'arm {number} needs a name: write name = "vanilla"')
        axes = _axes(entries.pop("grid", {}), f"arm {name}: grid")
        grids = entries.pop("grids", [])
        if not isinstance(grids, list) or not all(isinstance(grid, str) for grid in grids):
            raise ValueError(f"arm {name}: grids is {grids!r} but must be a list of names of grids")
        arms.append(_Arm(name, _flat(entries, f"arm {name}"), axes, tuple(grids)))
    return arms or [_Arm("", {}, {}, ())]


def _check_grid_names(arms: Sequence[_Arm], grids: Sequence[_Grid]) -> None:
    names = [grid.name for grid in grids]
    for arm in arms:
        _known(arm.grids, names, f"arm {arm.name}: the list of grids")


def _cells(
    recipe: str, base: dict[str, str], arms: Sequence[_Arm], grids: Sequence[_Grid], resolve: Resolve
) -> Iterator[Cell]:
    """Grid by grid, arm by arm: what is tuned comes first, and the seeds of an arm stand together."""
    parts = [(grid, arm, {**grid.axes, **arm.axes}) for grid in grids for arm in arms if _takes_part(arm, grid)]
    count = sum(math.prod(len(values) for values in axes.values()) for _, _, axes in parts)
    if not 0 < count <= _MOST_CELLS:
        raise ValueError(f"{count} cells, but a study has from 1 to {_MOST_CELLS}: shorten its lists")
    for grid, arm, axes in parts:
        for point in itertools.product(*axes.values()):
            chosen = dict(zip(axes, point, strict=True))
            yield _cell(recipe, {**base, **arm.overrides, **chosen}, chosen, arm.name, grid.name, resolve)


def _takes_part(arm: _Arm, grid: _Grid) -> bool:
    return not arm.grids or grid.name in arm.grids


def _cell(recipe: str, overrides: dict[str, str], axes: dict[str, str], arm: str, grid: str, resolve: Resolve) -> Cell:
    if ":" in overrides.get("model", ""):
        raise ValueError(f"model {overrides['model']!r} names code to import, which a file may not: name a network")
    overrides.setdefault("threads", "1")
    values = resolve(recipe, overrides)
    arm = arm or str(values["method"])
    axes = {key: value for key, value in axes.items() if (key, value) != ("method", arm)}
    words = [arm, *(f"{short(key)}{value}" for key, value in axes.items()), _digest(recipe, overrides)]
    return Cell("-".join(map(_slugged, words)), arm, (grid,), axes, recipe, overrides, values)


def _digest(recipe: str, overrides: Overrides) -> str:
    """So that a study whose base was changed does not take the cells of the old one for its own."""
    numbers = {key: text for key, text in overrides.items() if key not in NUMBERLESS}
    return hashlib.sha256(json.dumps([Path(recipe).name, numbers], sort_keys=True).encode()).hexdigest()[:6]


def _unique(cells: Iterator[Cell]) -> Iterator[Cell]:
    """A cell that several grids ask for is run once, and belongs to all of them."""
    found: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        identity = (cell.arm, *(value for key, value in cell.values.items() if key not in NUMBERLESS))
        first = found.setdefault(identity, cell)
        if first is not cell and cell.grids[0] not in first.grids:
            found[identity] = replace(first, grids=first.grids + cell.grids)
    yield from found.values()


def _axes(table: object, place: str) -> dict[str, list[str]]:
    axes = {}
    for key, values in _leaves(table, place):
        if not isinstance(values, list) or not values:
            raise ValueError(f"{place}: {key} is {_shown(values)} but must be a list of values, such as [0, 1, 2]")
        axes[key] = [_as_text(value, f"{place}: {key}") for value in values]
    return axes


def _flat(table: object, place: str) -> dict[str, str]:
    return {key: _as_text(value, f"{place}: {key}") for key, value in _leaves(table, place)}


def _leaves(table: object, place: str) -> Iterator[tuple[str, object]]:
    """Values by dotted key: optimizer.lr = 1, "optimizer.lr" = 1 and a table [base.optimizer] mean the same."""
    if not isinstance(table, dict):
        raise ValueError(f"{place} is {_shown(table)} but must be a table: write [{place}] and its keys below it")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value, f"{place}.{key}"))
        else:
            yield key, value


def _as_text(value: object, place: str) -> str:
    """The value as a flag writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return value
        case int() | float():
            return repr(value)
        case _:
            raise ValueError(f"{place} is {_shown(value)} but must be a number, a text, true or false")


def _list_of_tables(tables: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} is {_shown(tables)} but must be tables: write [[{name}]] and its keys below it")
    return tables


def _typed(tables: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = tables.get(key, default)
    if type(value) is not kind:
        raise ValueError(f"{key} is {_shown(value)} but must be {'a text' if kind is str else 'true or false'}")
    return value


def _known(given: Mapping[str, Any] | Sequence[str], known: Sequence[str], place: str) -> None:
    for name in given:
        if name not in known:
            _unknown(name, known, place)


def _unknown(name: str, known: Sequence[str], place: str) -> NoReturn:
    nearest = get_close_matches(name, known, 1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
    raise ValueError(f"{place} has no {name!r}; {hint}")


def _slugged(text: str) -> str:
    """Safe as the name of a file anywhere: 4/255 becomes 4-255."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}..."
