"""The run that represents an arm, and runs that lack pictures."""

from __future__ import annotations

from pathlib import Path

from conadv.study.results import GALLERY, read_results, showcase, without_pictures
from study.studies import make_study

STUDY = """
arm = [{name = "a"}, {name = "b", grids = ["tuning"]}, {name = "plain", method = "vanilla"},
       {name = "zero", attack.epsilon = 0}, {name = "uphill", method = "sam"}]
grid = [{name = "tuning", seed = [5, 6]}, {name = "final", seed = [0, 1]}, {name = "more", seed = [2]}]
"""


def test_an_arm_is_shown_by_its_first_cell_that_is_not_for_tuning(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY)
    seeds = {arm: result.values["seed"] for arm, result in showcase(read_results(folder)).items()}
    assert seeds == {"a": 0, "b": 5, "plain": 0, "zero": 0, "uphill": 0}


def test_pictures_are_missing_where_there_is_a_checkpoint_and_an_adversary(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY)
    for result in read_results(folder):
        (folder / "runs" / result.cell / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert [result.arm for result in without_pictures(folder)] == ["a", "b"]
    first = without_pictures(folder)[0]
    (folder / "runs" / first.cell / GALLERY).write_text("{}", encoding="utf-8")
    assert [result.arm for result in without_pictures(folder)] == ["b"]


def test_a_run_without_a_checkpoint_or_an_end_can_have_no_pictures(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY, lambda values: None)
    assert without_pictures(folder) == []
    assert without_pictures(make_study(tmp_path / "done", STUDY)) == []
