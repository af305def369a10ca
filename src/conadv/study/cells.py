"""The cells of a study: every combination of an arm and a point of a grid. Each cell is one run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Overrides = Mapping[str, str]
Resolve = Callable[[str, Overrides], Mapping[str, Any]]
"""Maps a recipe's name and overrides (strings by dotted key) to all values; ValueError if one is wrong."""

# Fields that do not affect the results of a run: cells that differ only in these are the same cell.
NUMBERLESS = frozenset({
    "layout", "threads", "timeout", "eval_every", "data.workers",
    "checkpoint.every", "checkpoint.minutes", "checkpoint.keep",
})  # fmt: skip

_MOST_CELLS = 100_000
_LONGEST_WORDS = 150  # file systems end names at 255 bytes


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    slug: str
    """Name of its folder; unique among cells with different results."""
    arm: str
    grids: tuple[str, ...]
    """The grids that it belongs to; an only grid is called "main"."""
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
class Grid:
    """Lists of values by dotted key; every combination of values is a point of the grid."""

    name: str
    axes: dict[str, list[str]]


@dataclass(frozen=True)
class Arm:
    """One of the things that a study compares: overrides, and axes of its own."""

    name: str
    """Empty: the name of the method."""
    overrides: dict[str, str]
    axes: dict[str, list[str]]
    grids: tuple[str, ...]
    """Empty: all."""


def flags(overrides: Overrides) -> list[str]:
    """Overrides as command-line arguments."""
    return [word for key, text in overrides.items() for word in ("--" + key.replace("_", "-"), text)]


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def expand(
    recipe: str, base: dict[str, str], arms: Sequence[Arm], grids: Sequence[Grid], resolve: Resolve
) -> tuple[Cell, ...]:
    """All cells of a study. A cell that several grids contain is listed once, with all its grids."""
    cells = tuple(_unique(_cells(recipe, base, arms, grids, resolve)))
    (slug, count), *_ = Counter(cell.slug for cell in cells).most_common(1)
    if count > 1:
        raise ValueError(f"two cells would share the folder {slug}: give their arms names that differ in letters")
    return cells


def _cells(
    recipe: str, base: dict[str, str], arms: Sequence[Arm], grids: Sequence[Grid], resolve: Resolve
) -> Iterator[Cell]:
    """Yield the cells grid by grid and arm by arm."""
    parts = [(grid, arm, {**grid.axes, **arm.axes}) for grid in grids for arm in arms if _takes_part(arm, grid)]
    count = sum(math.prod(len(values) for values in axes.values()) for _, _, axes in parts)
    if not 0 < count <= _MOST_CELLS:
        raise ValueError(f"{count} cells, but a study has from 1 to {_MOST_CELLS}: shorten its lists")
    for grid, arm, axes in parts:
        for point in itertools.product(*axes.values()):
            chosen = dict(zip(axes, point, strict=True))
            yield _cell(recipe, {**base, **arm.overrides, **chosen}, chosen, arm.name, grid.name, resolve)


def _takes_part(arm: Arm, grid: Grid) -> bool:
    return not arm.grids or grid.name in arm.grids


def _cell(recipe: str, overrides: dict[str, str], axes: dict[str, str], arm: str, grid: str, resolve: Resolve) -> Cell:
    if ":" in overrides.get("model", ""):
        raise ValueError(
            f"model {overrides['model']!r} would import code, which a study file may not do: use a built-in model"
        )
    overrides.setdefault("threads", "1")
    values = resolve(recipe, overrides)
    arm = arm or str(values["method"])
    axes = {key: value for key, value in axes.items() if (key, value) != ("method", arm)}
    words = slugged("-".join([arm, *(f"{short(key)}{value}" for key, value in axes.items())]))
    slug = f"{words[:_LONGEST_WORDS]}-{_digest(recipe, overrides)}"
    return Cell(slug, arm, (grid,), axes, recipe, overrides, values)


def _digest(recipe: str, overrides: Overrides) -> str:
    """A hash of the overrides, so that a changed study does not reuse cells of the old one."""
    numbers = {key: text for key, text in overrides.items() if key not in NUMBERLESS}
    return hashlib.sha256(json.dumps([Path(recipe).name, numbers], sort_keys=True).encode()).hexdigest()[:6]


def _unique(cells: Iterator[Cell]) -> Iterator[Cell]:
    found: dict[tuple[object, ...], Cell] = {}
    for cell in cells:
        identity = (cell.arm, *(value for key, value in cell.values.items() if key not in NUMBERLESS))
        first = found.setdefault(identity, cell)
        if first is not cell and cell.grids[0] not in first.grids:
            found[identity] = replace(first, grids=first.grids + cell.grids)
    yield from found.values()


def slugged(text: str) -> str:
    """Turn a text into a safe file name: 4/255 becomes 4-255."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
