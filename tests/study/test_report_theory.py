"""The sections of a report on staleness, sharpness and cost, and corrected p-values, from made-up results."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from conadv.study.report import write_report
from conadv.study.report.conditions import Spread, holm, spread, t_test
from conadv.study.report.cost import passes
from conadv.study.report.theory import _entry
from conadv.study.results import read_results, write_results
from study.reports import Page
from study.studies import make_study

STUDY = """
[base]
recipe = "digits"
chunk_size = 25
[[arm]]
name = "vanilla"
method = "vanilla"
[[arm]]
name = "vanilla, twice"
method = "vanilla"
epochs = 240
[[arm]]
name = "ConAdv"
method = "conadv"
[[arm]]
name = "recycled, half"
method = "recycled"
twin_share = 0.5
[[arm]]
name = "recycled"
method = "recycled"
[[arm]]
name = "noise"
method = "conadv"
attack.direction = "noise"
[grid]
seed = [0, 1, 2, 3]
batch_size = [25, 50, 100]
"""
TOP1 = {
    "vanilla": 50.0,
    "vanilla, twice": 51.0,
    "ConAdv": 53.0,
    "recycled, half": 54.0,
    "recycled": 55.0,
    "noise": 49.0,
}


def arm_of(values: Mapping[str, Any]) -> str:
    if values["method"] == "vanilla":
        return "vanilla, twice" if values["epochs"] == 240 else "vanilla"
    if values["method"] == "recycled":
        return "recycled, half" if values["twin_share"] == 0.5 else "recycled"
    return "noise" if values["attack.direction"] == "noise" else "ConAdv"


def outcome(values: Mapping[str, Any]) -> float:
    wave = math.sin(5 * values["seed"] + len(arm_of(values)))
    return TOP1[arm_of(values)] - values["batch_size"] / 25 + 0.3 * wave


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose runs have as many steps as their epochs and batches ask for."""
    folder = make_study(tmp_path_factory.mktemp("study"), STUDY, outcome)
    results = []
    for result in read_results(folder):
        steps = result.values["epochs"] * 100 // result.values["batch_size"]
        results.append(replace(result, summary={**(result.summary or {}), "steps": steps}))
        home = folder / "runs" / result.cell
        if result.values["method"] != "vanilla":
            _diagnose(home, result.values)
        _analyze(home, result.values, steps)
    write_results(folder, results)
    return folder


def _diagnose(home: Path, values: Mapping[str, Any]) -> None:
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    for line in lines[4::5]:
        line |= {"stale_distance": 0.25, "stale_agreement": 0.75, "weight_drift": 0.5, "lemma1_constant": 0.6}
        line |= {"stale_loss": 2.0, "fresh_loss": 2.125, "gradient_norm": 3.0, "gradient_variance": 5.0}
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _analyze(home: Path, values: Mapping[str, Any], step: int) -> None:
    sharp = {"eigenvalues": [2.0 + values["seed"], 1.0], "weight_norm": 10.0, "trace": 9.0, "loss": 1.0}
    sharp |= {"worst_loss": 1.5, "gradient_norm": 0.25}
    parts = {"main.sharpness": sharp, "main.accuracy": {"test_top1": 50.0, "robust_top1": 20.0}}
    if values["method"] != "vanilla":
        parts["adv.sharpness"] = sharp
    (home / "analysis.json").write_text(json.dumps({"about": {"step": step, "ema": False}, "parts": parts}))


@pytest.fixture(scope="module")
def page(study: Path) -> Page:
    write_report(study)
    return Page((study / "report.html").read_text(encoding="utf-8"))


def test_staleness_has_a_row_for_each_diagnosed_arm(page, study):
    table = page.table("Stale twins")
    assert {row[0].partition(",")[0] for row in table.rows} == {"ConAdv", "recycled", "noise"}
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert (row["distance of the twins"], row["constant of Lemma 1"]) == ("0.25", "0.6")
    assert (row["loss, fresh minus stale"], row["squared gradient norm"]) == ("0.125", "4")
    assert "## Staleness" in (study / "report.md").read_text(encoding="utf-8")


def test_sharpness_has_a_table_for_each_branch(page, study):
    main, adv = page.table("Sharpness of the main branch"), page.table("Sharpness of the adv branch")
    assert len(main.rows) == 18 and len(adv.rows) == 12
    row = dict(zip(main.head, main.rows[0], strict=True))
    assert row["largest eigenvalue λ"] == "3.5 ± 1.3"
    assert (row["λ·‖θ‖²"], row["worst loss − loss"], row["robust accuracy, %"]) == ("350 ± 130", "0.5 ± 0", "20 ± 0")
    assert "## Sharpness" in (study / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (48123.4, 20812.3, "48,000 ± 21,000"),
        (0.03517, 0.01214, "0.035 ± 0.012"),
        (-348.1, 53.29, "−348 ± 53"),
        (48.2, 0.0996, "48.20 ± 0.10"),
        (27.5, None, "27.5"),
        (0.5, 0.0, "0.5 ± 0"),
    ],
)
def test_sharpness_has_two_digits_of_the_deviation(mean, deviation, text):
    assert _entry(Spread(mean, deviation, 1 if deviation is None else 3)) == text


def test_the_sections_remain_without_the_folders_of_the_runs(page, study, tmp_path):
    for name in ("results.jsonl", "curves.json", "sharpness.json"):
        (tmp_path / name).write_bytes((study / name).read_bytes())
    write_report(tmp_path)
    again = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert again.table("Sharpness of the adv branch").rows == page.table("Sharpness of the adv branch").rows
    assert again.table("Stale twins").rows == page.table("Stale twins").rows


def test_a_report_keeps_what_it_saved_of_runs_that_are_gone(page, study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(study, folder)
    last = read_results(folder)[-1].cell  # as after a sweep that added one cell to stored results
    for run in (folder / "runs").iterdir():
        if run.name != last:
            shutil.rmtree(run)
    write_report(folder)
    again = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert again.table("Sharpness of the main branch").rows == page.table("Sharpness of the main branch").rows
    assert again.table("Stale twins").rows == page.table("Stale twins").rows
    assert json.loads((folder / "sharpness.json").read_text()) == json.loads((study / "sharpness.json").read_text())


def test_without_data_there_are_no_such_sections(tmp_path):
    text = STUDY.partition('[[arm]]\nname = "vanilla, twice"')[0] + "[grid]\nseed = [0, 1]\n"
    folder = make_study(tmp_path, text, lambda values: 50.0 + values["seed"])
    write_report(folder)
    titles = Page((folder / "report.html").read_text(encoding="utf-8")).titles
    assert not {"Staleness", "Sharpness", "Accuracy against work"} & set(titles)


def test_an_analysis_of_an_earlier_checkpoint_is_left_out_and_a_damaged_one_named(tmp_path):
    folder = make_study(tmp_path, STUDY, outcome)
    home = folder / "runs" / read_results(folder)[0].cell
    _analyze(home, {"seed": 0, "method": "vanilla"}, step=39)  # of 40
    write_report(folder)
    assert "Sharpness" not in Page((folder / "report.html").read_text(encoding="utf-8")).titles
    (home / "analysis.json").write_text('{"about": 3}')
    with pytest.raises(ValueError, match=r"analysis\.json' is damaged"):
        write_report(folder)


def test_the_frontier_names_what_dominates(page):
    table = page.table("Batch 100: work of the whole training")
    found = {row[0].partition(", batch")[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    work = {name: row["work"] for name, row in found.items()}
    assert work == {
        "vanilla": "1.00", "recycled, half": "1.50", "noise": "2.00", "recycled": "2.00", "vanilla, twice": "2.00",
        "ConAdv": "2.67",
    }  # fmt: skip
    over = {name: row["dominated"].partition(", batch")[0] for name, row in found.items()}
    assert over == {
        "vanilla": "no", "recycled, half": "no", "recycled": "no", "noise": "by recycled",
        "vanilla, twice": "by recycled", "ConAdv": "by recycled",
    }  # fmt: skip


def test_accuracy_and_gap_by_batch_are_drawn(page):
    assert any(caption.find("Test accuracy by batch: means, and their 95 % intervals") > 0 for caption in page.figures)
    assert any("Generalization gap by batch" in caption for caption in page.figures)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "vanilla"}, 3),
        ({"method": "sam", "delay": 1}, 6),
        ({"method": "disadv", "attack.steps": 3, "twin_share": 1.0}, 12),
        ({"method": "conadv", "twin_share": 0.25}, 4.25),
        ({"method": "recycled", "twin_share": 0.25}, 3.75),
        ({"method": "conadv", "data.views": "three"}, 11),
    ],
)
def test_passes_follow_from_the_table_of_methods(values, expected):
    assert passes(values) == pytest.approx(expected)


def test_p_values_are_those_of_scipy():
    for freedom in (1, 2, 3, 4, 5, 8, 11, 30):
        for t in (0.0, 0.3, -1.7, 4.0, 25.0):
            assert t_test(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)
    numbers = [0.4, 1.1, -0.2, 0.9, 0.6]
    assert spread(numbers).p_value == pytest.approx(stats.ttest_1samp(numbers, 0).pvalue)
    assert (spread([1.0, 1.0]).p_value, spread([0.0, 0.0]).p_value, spread([2.0]).p_value) == (0.0, 1.0, None)


def test_holm_rejects_step_by_step():
    """By its definition: go up through the p-values for as long as the k-th smallest is at most level / (m - k)."""
    p_values = [0.011, 0.2, 0.0004, 0.03, 0.012, 0.9]
    corrected = holm(p_values)
    for level in (0.001, 0.01, 0.05, 0.0601, 0.1, 0.5):
        rejected = set()
        for rank, place in enumerate(sorted(range(6), key=p_values.__getitem__)):
            if p_values[place] > level / (6 - rank):
                break
            rejected.add(place)
        assert {place for place, value in enumerate(corrected) if value <= level} == rejected


def test_the_table_of_differences_has_corrected_p_values(page):
    table = page.table("Test accuracy (top-1)")
    row = next(row for row in table.rows if row[0].startswith("recycled") and row[0] != "recycled, half")
    own = [outcome({"method": "recycled", "twin_share": 1.0, "batch_size": 25, "seed": seed}) for seed in range(4)]
    base = [outcome({"method": "vanilla", "epochs": 120, "batch_size": 25, "seed": seed}) for seed in range(4)]
    raw = stats.ttest_rel(own, base).pvalue
    shown = row[table.head.index("p, corrected")]
    assert "comparisons on this page: 15" in table.caption
    assert shown == "< 0.001" or raw <= float(shown) <= 15 * raw * 1.01


UNEVEN = """
title = "A method at the largest batch alone"
[base]
recipe = "digits"
chunk_size = 25
[[arm]]
name = "vanilla"
method = "vanilla"
[arm.grid]
batch_size = [25, 100]
[[arm]]
name = "ConAdv"
method = "conadv"
batch_size = 100
[grid]
seed = [0, 1, 2, 3]
"""


def test_beside_the_paper_methods_are_compared_at_the_same_batch(tmp_path):
    folder = make_study(tmp_path / "study", UNEVEN, outcome)
    write_report(folder)
    row = Page((folder / "report.html").read_text(encoding="utf-8")).table("What each method adds").rows[0]
    gains = [
        outcome({"method": "conadv", "attack.direction": "sign", "batch_size": 100, "seed": seed})
        - outcome({"method": "vanilla", "epochs": 120, "batch_size": 100, "seed": seed})
        for seed in range(4)
    ]
    assert row[0] == "ConAdv minus vanilla" and row[4].startswith(f"+{statistics.mean(gains):.1f}")


def test_an_arm_stands_beside_the_vanilla_that_it_is_compared_with(tmp_path):
    folder = make_study(tmp_path / "study", UNEVEN, outcome)
    write_report(folder)
    rows = Page((folder / "report.html").read_text(encoding="utf-8")).table("Test accuracy (top-1)").rows
    assert [row[:2] for row in rows] == [["vanilla", "25"], ["vanilla", "100"], ["ConAdv", "100"]]
