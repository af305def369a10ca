"""The numbers of a report against SciPy called directly, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from conadv.study.compare import ACCURACY, cells, conditions, holm, interval, main_cells
from conadv.study.figures import names
from conadv.study.report import rate_table, verdict
from conadv.study.results import Cell, read_results
from study.studies import SMALL, make_study

# Test accuracies by arm and seed. ConAdv has no seed 3, vanilla no seed 4.
RUNS = {"vanilla": {0: 30.0, 1: 31.0, 2: 32.5, 3: 30.2}, "conadv": {0: 33.1, 1: 33.4, 2: 36.0, 4: 39.0}}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    text = SMALL.replace("seed = [0, 1]", "seed = [0, 1, 2, 3, 4]")
    folder = make_study(tmp_path_factory.mktemp("study"), text, lambda v: RUNS.get(v["method"], {}).get(v["seed"]))
    return conditions(main_cells(cells(read_results(folder))))


def test_the_difference_is_paired_by_seed(table: pd.DataFrame) -> None:
    row = table.loc["conadv"]
    mine, theirs = [33.1, 33.4, 36.0], [30.0, 31.0, 32.5]
    assert (row.pairs, row.n, row.missing, row.baseline) == (3, 4, 1, "vanilla")
    assert row.difference == pytest.approx((3.1 + 2.4 + 3.5) / 3)
    test = stats.ttest_rel(mine, theirs)
    assert row.p == pytest.approx(test.pvalue)
    # By hand: the mean, and 4.3027 (97.5 % of Student's t with 2 degrees of freedom) standard errors around it.
    half = 4.302653 * np.std([3.1, 2.4, 3.5], ddof=1) / math.sqrt(3)
    assert (row.difference_low, row.difference_high) == pytest.approx((3.0 - half, 3.0 + half), rel=1e-6)
    assert row.p_holm == row.p, "a single comparison needs no correction"


def test_means_and_intervals(table: pd.DataFrame) -> None:
    row = table.loc["vanilla"]
    values = list(RUNS["vanilla"].values())
    assert (row[ACCURACY], row[f"{ACCURACY}_std"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert interval(pd.Series(values)) == pytest.approx(expected)
    assert math.isnan(row.difference), "vanilla is not compared with itself"
    assert all(map(math.isnan, interval(pd.Series([1.0]))))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),  # 3 × 0.01, then 2 × 0.03; 0.04 may not be below that
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([math.nan, 0.01, math.nan, 0.02], [math.nan, 0.02, math.nan, 0.02]),
        ([], []),
    ],
)
def test_holm_by_hand(given: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(holm(pd.Series(given, dtype=float)), expected)


def test_equal_differences_and_equal_runs_are_no_error(tmp_path: Path) -> None:
    same = {
        "vanilla": lambda seed: 30.0 + seed,
        "conadv": lambda seed: 31.0 + seed,
        "recycled": lambda seed: 30.0 + seed,
    }
    found = conditions(
        main_cells(cells(read_results(make_study(tmp_path, SMALL, lambda v: same[v["method"]](v["seed"])))))
    )
    assert found.difference["conadv"] == 1.0 and found.p["conadv"] == 0.0
    assert found.difference["recycled"] == 0.0 and not found.p["recycled"] < 0.05


def study(tmp_path: Path, text: str, outcome) -> pd.DataFrame:
    return main_cells(cells(read_results(make_study(tmp_path, text, outcome))))


def test_tuning_runs_are_left_out_and_the_best_rate_is_taken(tmp_path: Path) -> None:
    text = """
        [[arm]]
        name = "a"
        [[grid]]
        name = "tuning"
        seed = [9]
        optimizer.lr = [1, 2]
        [[grid]]
        name = "final"
        seed = [0, 1]
        optimizer.lr = [4, 8]
    """
    chosen = study(tmp_path, text, lambda v: 10.0 * v["optimizer.lr"] if v["optimizer.lr"] < 8 else 1.0)
    assert (set(chosen.rate), set(chosen.seed)) == ({4.0}, {0, 1})
    chosen = study(tmp_path / "early", text, lambda v: 10.0 * v["optimizer.lr"] if v["seed"] == 9 else None)
    assert set(chosen.rate) == {2.0}, "as long as nothing else has finished, tuning runs are shown"


def test_settings_that_a_method_does_not_use_make_no_difference(tmp_path: Path) -> None:
    text = '[grid]\nmethod = ["vanilla", "conadv"]\nseed = [0, 1]\nattack.epsilon = [0, "4/255"]\n'
    chosen = study(tmp_path, text, lambda v: 30.0 + v["seed"])
    assert dict(chosen.groupby("label").size()) == {"vanilla": 2, "conadv, ε 0/255": 2, "conadv, ε 4/255": 2}


def test_the_baseline_has_the_same_data_model_and_batch(tmp_path: Path) -> None:
    text = """
        [base]
        chunk_size = 25
        [grid]
        method = ["vanilla", "conadv"]
        batch_size = [25, 50]
        seed = [0, 1]
    """
    found = conditions(study(tmp_path, text, lambda v: 30.0 + v["seed"] + v["batch_size"]))
    assert found.baseline["conadv, batch 50"] == "vanilla, batch 50"
    assert found.baseline["conadv, batch 25"] == "vanilla, batch 25"


def test_an_arm_named_like_another_with_its_settings_stays_apart(tmp_path: Path) -> None:
    text = """
        [base]
        chunk_size = 25
        [[arm]]
        name = "a"
        [arm.grid]
        batch_size = [25, 50]
        [[arm]]
        name = "a, batch 25"
        delay = 3
    """
    chosen = study(tmp_path, text, lambda v: 30.0)
    assert chosen.label.nunique() == 3


def test_tuning_runs_are_judged_on_held_out_images_and_a_best_rate_at_the_edge_is_named(tmp_path: Path) -> None:
    held_out = {5: 60.0, 10: 70.0, 20: 65.0, 40: 80.0}  # by learning rate; the test accuracy would choose another one
    text = """arm = [{name = "vanilla", method = "vanilla"}]
    [[grid]]
    name = "tuning"
    "optimizer.lr" = [5, 10, 20]
    [[grid]]
    name = "final"
    seed = [1, 2]
    """
    results = read_results(make_study(tmp_path, text))

    def with_held_out(result: Cell) -> Cell:
        return replace(result, summary={**result.summary, "held_out_top1": held_out[result.values["optimizer.lr"]]})

    found = cells([with_held_out(result) for result in results])
    assert rate_table(found).to_dict("records") == [
        {"arm": "vanilla", "5": "60.0", "10": "70.0", "20": "65.0", "best": "10"}
    ]
    table = conditions(main_cells(found))
    assert names(table)[ACCURACY] == "test accuracy, %"
    assert table.accuracy["vanilla"] == found[~found.tuning].test_top1.mean()
    tuning = found[found.tuning & (found.rate < 20)]
    assert rate_table(tuning).best.tolist() == ["10, at the edge"]
    alone = conditions(main_cells(tuning))
    assert (names(alone)[ACCURACY], alone.accuracy["vanilla"]) == ("held-out accuracy, %", 70.0)
    assert "highest held-out accuracy, 70.0 %" in verdict(tuning, alone)[0]
