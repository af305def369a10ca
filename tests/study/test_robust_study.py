"""The script beside the robust study: its intervals against SciPy's paired test, and which cells it takes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from scipy import stats

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "studies" / "robust" / "analyse.py"))


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
    assert SCRIPT["table"](results) in (root / "docs" / "results.md").read_text(encoding="utf-8")
