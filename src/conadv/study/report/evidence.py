"""The data of a report: the files of a sweep, read and grouped into conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conadv.study.origin import read_origins
from conadv.study.results import GALLERY, Result, read_results, read_saved
from conadv.toml_file import read_toml
from conadv.trainer.metrics import read_metrics

from .conditions import TOP1, Condition, Spread, baseline, holm, labels, main_conditions, representatives


@dataclass(frozen=True)
class Evidence:
    """The folder of a study, read."""

    folder: Path
    title: str
    about: str
    conclusions: str
    study_text: str
    timed: bool
    """Whether times are shown."""
    results: Sequence[Result]
    origins: Sequence[dict[str, Any]]

    @cached_property
    def main(self) -> list[Condition]:
        """The conditions to compare, each at its best learning rate."""
        return main_conditions(self.results)

    @cached_property
    def shown(self) -> list[Condition]:
        """The conditions of `main` in the main tables; the others appear only in the section of their setting."""
        return representatives(self.main)

    @cached_property
    def _names(self) -> dict[Condition, str]:
        return dict(zip(self.shown, labels(self.shown), strict=True))

    def name(self, condition: Condition) -> str:
        """The name of a condition, unique among `shown`."""
        return self._names[condition]

    def baseline(self, condition: Condition) -> Condition | None:
        """The vanilla condition to compare with."""
        return baseline(self.main, condition)

    def is_baseline(self, condition: Condition) -> bool:
        return self.baseline(condition) is condition

    def gain(self, condition: Condition) -> Spread | None:
        """Test accuracy minus vanilla's, in points; None for vanilla itself, or without vanilla."""
        vanilla = self.baseline(condition)
        return None if vanilla is None or vanilla is condition else condition.minus(vanilla, TOP1)

    @cached_property
    def _corrected(self) -> dict[Condition, float]:
        gains = {one: gain.p_value for one in self.main if (gain := self.gain(one))}
        known = {one: p_value for one, p_value in gains.items() if p_value is not None}
        return dict(zip(known, holm(list(known.values())), strict=True))

    @property
    def comparisons(self) -> int:
        """The number of differences from vanilla that have a p-value."""
        return len(self._corrected)

    def p_value(self, condition: Condition) -> float | None:
        """The p-value of no difference from vanilla, corrected for multiple comparisons; None for a single seed."""
        return self._corrected.get(condition)

    def step_ratio(self, condition: Condition) -> Spread | None:
        """Time per step relative to vanilla's."""
        vanilla = self.baseline(condition)
        return None if vanilla is None else vanilla.over(condition, "images_per_second")

    def metrics(self, run: Result) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one per step; empty if the folder of the run is gone."""
        return read_metrics(self.folder / "runs" / run.cell / "metrics.jsonl")

    def gallery(self, run: Result) -> Any:
        """The content of gallery.json, unchecked; None if there is no such file, ValueError if it is not JSON."""
        return read_saved(self.folder / "runs" / run.cell / GALLERY, lambda content: content, None)


def collect(folder: Path) -> Evidence:
    """Read the folder of a study; ValueError if it is not one, or damaged."""
    results = read_results(folder)
    if not results:
        raise ValueError(f"{str(folder)!r} has no cells: run conadv sweep first")
    text, tables = _study(folder / "study.toml")
    title, about, conclusions = (str(tables.get(key, "")) for key in ("title", "about", "conclusions"))
    title, timed = title or folder.resolve().name, tables.get("timed", True)
    if not isinstance(timed, bool):
        raise ValueError(f"timed is {timed!r} but must be true or false: change {str(folder / 'study.toml')!r}")
    return Evidence(folder, title, about, conclusions, text, timed, results, read_origins(folder))


def _study(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        return read_toml(path)
    except FileNotFoundError:  # the results alone are enough for a report
        return "", {}
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): remove it; a report works without it") from None
