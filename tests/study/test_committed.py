"""The committed studies: their own rules, and what pages quote of them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats
from studies.earlier import page

from conadv.study.study_file import read_study
from support.promises import few

ROOT = Path(__file__).parents[2]
RESULTS, ROBUST = ROOT / "studies" / "earlier", ROOT / "studies" / "robust"
ROBUST_SCRIPT = runpy.run_path(str(ROBUST / "analyse.py"))


def test_the_page_and_the_cells_are_those_of_the_results() -> None:
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == page.page()
    assert sorted(page.STUDIES) == sorted(path.parent.name for path in RESULTS.glob("*/study.toml"))
    for name in page.STUDIES:
        assert (RESULTS / name / "cells.csv").read_text(encoding="utf-8") == page.csv(name)


def test_the_page_of_the_protocols_has_the_table_of_its_results() -> None:
    protocol = ROOT / "studies" / "protocol"
    script = runpy.run_path(str(protocol / "analyse.py"))
    cells = script["read"](protocol / "results.jsonl")
    page = (protocol / "README.md").read_text(encoding="utf-8")
    assert script["screen_table"](cells) in page
    assert script["final_table"](cells) in page
    gains = script["differences"](cells[cells.part == "screen"]).set_index(["arm", "epsilon", "seed"])
    lines = (protocol / "results.jsonl").read_text(encoding="utf-8").splitlines()
    by_hand = {cell["cell"]: cell["summary"] for cell in map(json.loads, lines)}
    own, base = by_hand["plain-seed21-a6a315"], by_hand["vanilla-seed21-543851"]
    assert gains.difference["plain", "2", 21] == own["held_out_top1"] - base["held_out_top1"]


@pytest.mark.parametrize(("shift", "equivalent"), [(0.1, True), (0.9, False), (-2.0, False)])
def test_equivalent_means_that_the_paired_interval_lies_within_the_margin(shift: float, equivalent: bool) -> None:
    base = {0: 30.0, 1: 31.0, 2: 29.5, 3: 30.2, 7: 99.0}
    noise = (0.2, -0.3, 0.1, 0.0)
    own = {seed: base[seed] + shift + noise[seed] for seed in range(4)} | {8: 50.0}
    found = ROBUST_SCRIPT["compare"](own, base)
    wanted = stats.ttest_rel([own[seed] for seed in range(4)], [base[seed] for seed in range(4)])
    low, high = wanted.confidence_interval(0.95)
    assert (found.seeds, found.low, found.high) == (4, pytest.approx(low), pytest.approx(high))
    assert found.equivalent == equivalent
    assert ROBUST_SCRIPT["compare"]({0: 1.0}, {0: 2.0, 1: 3.0}) is None


def test_the_pages_have_the_table_of_the_robust_study() -> None:
    results, study = ROBUST / "results.jsonl", (ROBUST / "README.md").read_text(encoding="utf-8")
    assert ROBUST_SCRIPT["table"](results) in study
    assert ROBUST_SCRIPT["verdicts"](results) in study
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert ROBUST_SCRIPT["table"](results) in page
    assert ROBUST_SCRIPT["verdicts"](results) in page
    overfitting = runpy.run_path(str(ROBUST / "overfitting.py"))
    assert overfitting["table"](pd.read_csv(overfitting["EPOCHS"])) in study


LEFT = ("SAM, stale",)  # arms with options that the library no longer has
STUDIES = sorted((ROOT / "studies").glob("**/*.toml"))


@pytest.mark.parametrize(
    "path", few(zip(STUDIES, strict=True), lambda path: RESULTS not in path.parents), ids=lambda path: path.parent.name
)
def test_every_study_file_can_be_swept(path: Path) -> None:
    cells = read_study(path).cells
    if path.name == "study.toml" and path.parent.parent == RESULTS:
        lines = (path.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
        ran = {cell["cell"] for cell in map(json.loads, lines) if cell["arm"] not in LEFT}
        assert {cell.cell for cell in cells} == ran
