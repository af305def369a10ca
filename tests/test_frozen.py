"""Values that pass from part to part cannot be changed on their way."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import conadv

# What counts, or is filled in step by step.
MAY_CHANGE = {"_Job", "Progress"}
PARTS = ("core", "optim", "ranks", "task", "trainer", "config")


def dataclasses_of(part: str) -> Iterator[type]:
    package = import_module(f"conadv.{part}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for found in vars(import_module(module.name)).values():
            if isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module.name:
                yield found


def test_dataclasses_are_frozen():
    assert conadv.__path__
    found = [entry for part in PARTS for entry in dataclasses_of(part)]
    assert len(found) > 30
    open_ones = {entry.__name__ for entry in found if not entry.__dataclass_params__.frozen}  # type: ignore[attr-defined]
    assert open_ones == MAY_CHANGE
