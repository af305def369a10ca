"""What a report speaks of: the results of a study, sorted into what is compared, and where they come from."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conadv.study.origin import read_origins
from conadv.study.results import GALLERY, Result, read_results
from conadv.train.metrics import read_metrics

from .conditions import Condition, best_rates, conditions, labels, main_results, representatives


@dataclass(frozen=True)
class Evidence:
    """The folder of a study, read."""

    folder: Path
    title: str
    about: str
    conclusions: str
    study_text: str
    results: Sequence[Result]
    origins: Sequence[dict[str, Any]]

    @cached_property
    def main(self) -> list[Condition]:
        """What is compared, each at its best learning rate."""
        return [condition for condition in best_rates(conditions(main_results(self.results))) if condition.runs]

    @cached_property
    def names(self) -> dict[int, str]:
        return {id(one): name for one, name in zip(self.shown, labels(self.shown), strict=True)}

    @cached_property
    def shown(self) -> list[Condition]:
        """Those of `main` that stand for their arms; the others are shown with the setting in which they differ."""
        return representatives(self.main)

    def name(self, condition: Condition) -> str:
        """What tells a condition of `shown` from the others."""
        return self.names[id(condition)]

    def metrics(self, run: Result) -> list[dict[str, Any]]:
        """A line a step; empty where the folder of the run is gone."""
        return read_metrics(self.folder / "runs" / run.cell / "metrics.jsonl")

    def gallery(self, run: Result) -> dict[str, Any] | None:
        """Images with their twins, as conadv.study.gallery writes them; None where it wrote none."""
        try:
            gallery: dict[str, Any] = json.loads((self.folder / "runs" / run.cell / GALLERY).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return gallery


def collect(folder: Path) -> Evidence:
    """Everything that a sweep left in a folder; ValueError where that is no study."""
    results = read_results(folder)
    if not results:
        raise ValueError(f"{str(folder)!r} has no cells: run conadv sweep first")
    try:
        text = (folder / "study.toml").read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, ValueError):  # the results alone are enough for a report
        text, tables = "", {}
    return Evidence(
        folder,
        str(tables.get("title", folder.resolve().name)),
        str(tables.get("about", "")),
        str(tables.get("conclusions", "")),
        text,
        results,
        read_origins(folder),
    )
