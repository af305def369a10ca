"""Studies with made-up numbers, so that reports can be tested without training anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conadv.study.results import Cell, read_summary, write_results
from conadv.study.study_file import read_study

STUDY = """
title = "All that a <study> can have"
about = "What is asked: does a twin help? With <tags> & `code`."
conclusions = "It holds."

[base]
recipe = "digits"
batch_size = 50
chunk_size = 25

[[arm]]
name = "vanilla"
method = "vanilla"

[[arm]]
name = "ConAdv"
method = "conadv"

[[arm]]
name = "recycled $x_2$"
method = "recycled"

[[arm]]
name = "ConAdv + AA"
data.augment = "autoaugment-cifar10"
grids = ["final"]

[[grid]]
name = "tuning"
seed = [10]
optimizer.lr = [5, 10, 20]

[[grid]]
name = "final"
seed = [0, 1, 2, 3]

[[grid]]
name = "batch"
seed = [0, 1, 2]
batch_size = [25, 100]
"""

SMALL = """title = "Damage"
arm = [{name = "vanilla", method = "vanilla"}, {name = "recycled", method = "recycled"}, {name = "conadv"}]
[grid]
seed = [0, 1]
"""
Outcome = Callable[[Mapping[str, Any]], float | str | None]
"""The test accuracy of a cell with these values, or its error, or None where it has not been run."""


def accuracy(values: Mapping[str, Any]) -> float | str | None:
    """Different for every setting and seed; one cell fails and one is still to come."""
    if values["method"] == "recycled" and values["optimizer.lr"] == 20:
        return "the loss of step 3 is not finite <b>"
    if values["method"] == "recycled" and values["seed"] == 3:
        return None
    gain = {"vanilla": 0.0, "conadv": 4.2, "recycled": 1.1}[values["method"]]
    gain -= abs(math.log2(values["optimizer.lr"] / 10)) + 0.8 * math.log2(values["batch_size"] / 25)
    return 33 + gain + 0.7 * math.sin(7.3 * values["seed"]) + 0.2 * math.sin(len(values["method"]) * values["seed"])


def make_study(
    folder: Path, text: str = STUDY, outcome: Outcome = accuracy, steps: int = 20, robust: bool = False
) -> Path:
    """The folder that a sweep of this study would leave, had its cells these outcomes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(text, encoding="utf-8")
    results = []
    for cell in read_study(folder / "study.toml").cells:
        found, home = outcome(cell.values), folder / "runs" / cell.cell
        if isinstance(found, float):
            _finish(cell, home, found, steps, robust)
        error = found if isinstance(found, str) else None
        results.append(replace(cell, summary=read_summary(home), error=error, commit="0123456789ab"))
    write_results(folder, results)
    (folder / "origin.json").write_text('[{"processor": "A <processor>", "cores": 2}]', encoding="utf-8")
    return folder


def _finish(cell: Cell, home: Path, top1: float, steps: int, robust: bool) -> None:
    home.mkdir(parents=True, exist_ok=True)
    work = {"vanilla": 3, "conadv": 8, "recycled": 6}[cell.values["method"]]
    summary = {"seconds": 10.0 * work + cell.values["seed"], "test_top1": top1, "train_top1": 99.0, "gap": 99.0 - top1}
    summary |= {"robust_top1": top1 / 2} if robust else {}
    (home / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    lines = []
    for step in range(steps):
        line = {"step": step, "epoch": (step + 1) / 2, "clean_loss": top1 / (step + 1)}
        line |= {"test_top1": top1 * (step + 1) / steps} if step % 5 == 4 else {}
        lines.append(json.dumps(line) + "\n")
    (home / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
