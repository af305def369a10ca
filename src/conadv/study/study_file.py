"""Study files: TOML that describes many runs.

    title, about, conclusions texts for the report
    keep_checkpoints          true: keep the checkpoints of all cells
    [base]                    recipe = "digits", and values for all cells
    [[arm]]                   name = "delay 2", and values for the cells of this arm; without arms: one per method
    [arm.grid]                more axes for this arm only, or other values on a common axis
    [grid] or [[grid]]        common axes: one list per key; every combination is a cell; several grids need names

Later ones override earlier ones: base, arm, grid, arm.grid. An arm with `grids = ["final"]` is only in those grids.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from .cells import Arm, Cell, Grid, Resolve, expand, slugged

_TOP = ("title", "about", "conclusions", "keep_checkpoints", "base", "grid", "arm")
_LARGEST_FILE = 1_000_000


@dataclass(frozen=True)
class Study:
    """A study file, read and checked."""

    path: Path
    text: str
    title: str
    about: str
    """The question: paragraphs at the top of the report."""
    conclusions: str
    keep_checkpoints: bool
    cells: tuple[Cell, ...]


def read_study(path: Path, resolve: Resolve) -> Study:
    """Read and check a study file; anything wrong with it is a ValueError of one line."""
    text = _text(path)
    try:
        tables = tomllib.loads(text)
        _known(tables, _TOP, "a study")
        recipe, base = _base(tables.get("base", {}), path.parent)
        grids, arms = _grids(tables.get("grid", {})), _arms(tables.get("arm", []))
        _check_grid_names(arms, grids)
        return Study(
            path,
            text,
            _typed(tables, "title", str, path.stem),
            _typed(tables, "about", str, ""),
            _typed(tables, "conclusions", str, ""),
            _typed(tables, "keep_checkpoints", bool, False),
            expand(recipe, base, arms, grids, resolve),
        )
    except RecursionError:
        raise ValueError(f"study {str(path)!r}: brackets nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"study {str(path)!r}: {' '.join(str(error).split())}") from None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ValueError(f"study {str(path)!r}: larger than {_LARGEST_FILE} bytes; pass a TOML file")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"study {str(path)!r}: {error.strerror or error}; pass a TOML file") from None
    except UnicodeDecodeError:
        raise ValueError(f"study {str(path)!r}: not UTF-8 text; pass a TOML file") from None


def _base(table: object, folder: Path) -> tuple[str, dict[str, str]]:
    """The recipe, by name or by its path relative to the study file, and the values for all cells."""
    overrides = _flat(table, "base")
    recipe = overrides.pop("recipe", "digits")
    beside = folder / recipe
    return (str(beside) if beside.is_file() else recipe), overrides


def _grids(tables: object) -> list[Grid]:
    if isinstance(tables, dict):
        return [Grid("main", _axes(tables, "grid"))]
    grids = []
    for number, table in enumerate(_list_of_tables(tables, "grid"), 1):
        axes = dict(table)
        name = axes.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f'grid {number} of several needs a name: write name = "tuning"')
        grids.append(Grid(name, _axes(axes, f"grid {name}")))
    names = [grid.name for grid in grids]
    if len(set(names)) < len(names):
        raise ValueError(f"two grids have the same name ({', '.join(names)}): rename one")
    return grids or [Grid("main", {})]


def _arms(tables: object) -> list[Arm]:
    """Parse the arms. Two may have the same name, so that an arm can have different grids."""
    arms = []
    for number, table in enumerate(_list_of_tables(tables, "arm"), 1):
        entries = dict(table)
        name = entries.pop("name", None)
        if not isinstance(name, str) or not slugged(name):
            raise ValueError(f'arm {number} needs a name: write name = "vanilla"')
        axes = _axes(entries.pop("grid", {}), f"arm {name}: grid")
        grids = entries.pop("grids", [])
        if not isinstance(grids, list) or not all(isinstance(grid, str) for grid in grids):
            raise ValueError(f"arm {name}: grids is {grids!r} but must be a list of names of grids")
        arms.append(Arm(name, _flat(entries, f"arm {name}"), axes, tuple(grids)))
    return arms or [Arm("", {}, {}, ())]


def _check_grid_names(arms: Sequence[Arm], grids: Sequence[Grid]) -> None:
    names = [grid.name for grid in grids]
    for arm in arms:
        _known(arm.grids, names, f"arm {arm.name}: the list of grids")


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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}..."
