"""The committed studies: their own rules, and what pages quote of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pytest
from studies.earlier import page

from conadv.study.study_file import read_study
from conadv.study_commands import resolve

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "earlier"


def test_the_page_and_the_cells_are_those_of_the_results() -> None:
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == page.page()
    assert sorted(page.STUDIES) == sorted(path.parent.name for path in RESULTS.glob("*/study.toml"))
    for name in page.STUDIES:
        assert (RESULTS / name / "cells.csv").read_text(encoding="utf-8") == page.csv(name)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "studies").glob("**/*.toml")), ids=lambda path: path.name + path.parent.name
)
def test_every_study_file_can_be_swept(path: Path) -> None:
    cells = read_study(path, resolve).cells
    if path.name == "study.toml" and path.parent.parent == RESULTS:
        lines = (path.parent / "results.jsonl").read_text(encoding="utf-8").splitlines()
        assert {cell.slug for cell in cells} == {json.loads(line)["cell"] for line in lines}


def test_the_study_of_batches_takes_enough_steps_and_tunes_every_arm_that_it_compares() -> None:
    cells = read_study(ROOT / "studies" / "batch" / "study.toml", resolve).cells
    steps = {
        cell.values["epochs"] * (10_000 * cell.values["data.copies"] // cell.values["batch_size"]) for cell in cells
    }
    assert min(steps) >= 600
    tuned, final = defaultdict(set), defaultdict(set)
    for cell in cells:
        rates = tuned if all(name.startswith("tuning") for name in cell.grids) else final
        rates[cell.arm, cell.values["batch_size"]].add(cell.values["optimizer.lr"])
    borrowed = {("ConAdv, no adversary", 1000), ("DisAdv", 1000), ("three views, no adversary", 1000)}
    assert final.keys() - tuned.keys() == borrowed
    assert all(len(final[arm]) == 1 and min(tuned[arm]) < min(final[arm]) < max(tuned[arm]) for arm in tuned)


@pytest.mark.parametrize(
    ("study", "grids"),
    [
        ("cifar10-batch", 26),  # six methods at four batch sizes, and DisAdv at two
        ("cifar10-data", 7),  # two methods in four settings, one of which was not tuned
    ],
)
def test_the_rates_of_a_study_are_the_best_ones_and_inside_their_grids(study: str, grids: int) -> None:
    tuned: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    final = defaultdict(set)
    for line in (RESULTS / study / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        values, arm = result["values"], (result["arm"], result["values"]["batch_size"])
        if values["data.path"] == "runs/cifar10-tuning":
            tuned[arm][values["optimizer.lr"]].append(result["summary"]["test_top1"])
        else:
            final[arm].add(values["optimizer.lr"])
    assert len(tuned) == grids
    for arm, accuracies in tuned.items():
        best = max(accuracies, key=lambda rate: fmean(accuracies[rate]))
        assert final[arm] == {best}, arm
        assert min(accuracies) < best < max(accuracies), arm


@pytest.mark.parametrize(
    "arm",
    [
        "ConAdv",
        "recycled",
        "recycled, twins of a quarter",
        "recycled, epsilon 0, twins of a quarter",
        "Fast AdvProp",
        "SAM",
        "SAM, stale",
        "vanilla, 400 epochs",
    ],
)
def test_the_comparison_quotes_the_differences_of_the_study_by_work(arm: str) -> None:
    study = (RESULTS / "README.md").read_text().partition("## cifar10-cost")[2].partition("\n## ")[0]
    row = next(line for line in study.splitlines() if line.startswith(f"| {arm} |"))
    mean, interval = (cell.replace("+", "").replace("−", "-") for cell in row.strip("| ").split(" | ")[2:4])
    assert f"{mean} ({interval})" in (ROOT / "docs" / "compare.md").read_text()
