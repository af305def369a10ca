"""Which run stands for an arm in pictures, and which of them still have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from .results import Result, read_results

GALLERY = "gallery.json"


class Member(Protocol):
    """A cell, or its result."""

    @property
    def arm(self) -> str: ...

    @property
    def grids(self) -> Sequence[str]: ...


M = TypeVar("M", bound=Member)


def is_tuning(member: Member) -> bool:
    """Whether a cell serves only to choose a learning rate: its grids are all called tuning, or the like."""
    return all(is_tuning_grid(grid) for grid in member.grids)


def is_tuning_grid(name: str) -> bool:
    return name.lower().startswith("tun")


def showcase(members: Iterable[M]) -> dict[str, M]:
    """The cell that stands for each arm: the first that is not for tuning, or the first."""
    chosen: dict[str, M] = {}
    for member in members:
        if member.arm not in chosen or (is_tuning(chosen[member.arm]) and not is_tuning(member)):
            chosen[member.arm] = member
    return chosen


def without_pictures(folder: Path) -> list[Result]:
    """The runs that should have pictures and can still be given them: their checkpoint is there."""
    return [
        result
        for result in showcase(read_results(folder)).values()
        if result.summary is not None
        and result.values["method"] != "vanilla"
        and result.values["attack.epsilon"] > 0
        and not (folder / "runs" / result.cell / GALLERY).exists()
        and any((folder / "runs" / result.cell / "checkpoints").glob("step-*"))
    ]
