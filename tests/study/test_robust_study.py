"""The scripts beside the robust study: intervals against SciPy's paired test, which cells they take, and collapses."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

STUDY = Path(__file__).parents[2] / "studies" / "robust"
SCRIPT = runpy.run_path(str(STUDY / "analyse.py"))
OVERFITTING = runpy.run_path(str(STUDY / "overfitting.py"))


@pytest.mark.parametrize(("shift", "equivalent"), [(0.1, True), (0.9, False), (-2.0, False)])
def test_equivalent_means_that_the_paired_interval_lies_within_the_margin(shift: float, equivalent: bool) -> None:
    base = {0: 30.0, 1: 31.0, 2: 29.5, 3: 30.2, 7: 99.0}
    noise = (0.2, -0.3, 0.1, 0.0)
    own = {seed: base[seed] + shift + noise[seed] for seed in range(4)} | {8: 50.0}
    found = SCRIPT["compare"](own, base)
    wanted = stats.ttest_rel([own[seed] for seed in range(4)], [base[seed] for seed in range(4)])
    low, high = wanted.confidence_interval(0.95)
    assert (found.seeds, found.low, found.high) == (4, pytest.approx(low), pytest.approx(high))
    assert found.equivalent == equivalent
    assert SCRIPT["compare"]({0: 1.0}, {0: 2.0, 1: 3.0}) is None


def test_it_takes_the_finished_cells_of_the_final_grids_only(tmp_path: Path) -> None:
    def line(arm: str, grid: str, summary: dict[str, float] | None) -> str:
        return json.dumps({"arm": arm, "grids": ["seed 0", grid], "summary": summary})

    path = tmp_path / "results.jsonl"
    rows = [
        line("one step, fresh", "final", {"seed": 0, "robust_top1": 30.0}),
        line("one step, fresh", "final", None),
        line("one step, fresh", "tuning", {"seed": 10, "robust_top1": 20.0}),
        line("three steps, fresh", "final, three steps", {"seed": 0, "robust_top1": 31.0}),
    ]
    path.write_text("\n".join(rows) + "\n")
    found = SCRIPT["read"](path)
    assert found == {"one step, fresh": {0: 30.0}, "three steps, fresh": {0: 31.0}}
    SCRIPT["draw"](found, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")


def test_the_pages_have_the_table_of_the_results() -> None:
    root = Path(__file__).parents[2]
    results = root / "studies" / "robust" / "results.jsonl"
    study = (root / "studies" / "robust" / "README.md").read_text(encoding="utf-8")
    assert SCRIPT["table"](results) in study
    assert SCRIPT["verdicts"](results) in study
    page = (root / "docs" / "results.md").read_text(encoding="utf-8")
    assert SCRIPT["table"](results) in page
    assert SCRIPT["verdicts"](results) in page
    assert OVERFITTING["table"](pd.read_csv(OVERFITTING["EPOCHS"])) in study


def test_a_run_has_collapsed_below_half_of_its_best_so_far() -> None:
    def collapse(*robust: float) -> int | None:
        run = pd.DataFrame({"epoch": range(1, len(robust) + 1), "held_out_robust_top1": robust})
        return OVERFITTING["collapse"](run.sample(frac=1, random_state=0))

    assert collapse(10, 20, 11, 10) is None
    assert collapse(10, 20, 9, 30) == 3
    assert collapse(4, 0) == 2
