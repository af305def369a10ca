"""What a sweep tells of itself."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from conadv.study.progress import SweepProgress
from conadv.study.results import Result, read_results
from conadv.trainer.progress import ProgressBar
from study.studies import make_study


@pytest.fixture
def results(tmp_path: Path) -> list[Result]:
    """Two arms of three cells; the first of each is done, in 30 s (vanilla) and 80 s (conadv)."""
    text = '[grid]\nmethod = ["vanilla", "conadv"]\nseed = [0, 1, 2]\n'
    return read_results(make_study(tmp_path, text, lambda values: 50.0 if values["seed"] == 0 else None))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(
    results: list[Result], stream: io.StringIO, jobs: int = 1, quiet: bool = False, seconds: float = 60.0
) -> SweepProgress:
    told = SweepProgress(ProgressBar(0, len(results), quiet, stream, seconds, estimates=False), len(results), jobs)
    told.begin(results)
    return told


def finished(result: Result, like: Result) -> Result:
    return Result(**{**vars(result), "summary": like.summary})


def test_the_time_left_is_by_the_means_of_the_arms(results: list[Result]) -> None:
    out = io.StringIO()
    told = watch(results, out)
    assert out.getvalue() == "6 cells, 1 at a time; 2 of 6 are already done, about 4 min left\n"
    told.ended(finished(results[1], results[0]), 50.0)
    # Left: one vanilla at (30 + 50) / 2 = 40 s and two conadv at 80 s.
    assert out.getvalue().splitlines()[-1] == "[3/6] vanilla · seed 1: 50.00 % (50 s), about 3 min left"


def test_cells_side_by_side_take_less_time_but_no_more_than_there_are(results: list[Result]) -> None:
    out = io.StringIO()
    told = watch(results, out, jobs=64)
    told.ended(finished(results[1], results[0]), 30.0)
    assert out.getvalue().splitlines()[-1].endswith("about 63 s left")  # (30 + 80 + 80) / 3 cells


def test_an_arm_without_a_finished_cell_is_taken_for_the_mean_of_all(results: list[Result]) -> None:
    out = io.StringIO()
    unknown = [Result(**{**vars(result), "summary": None}) if result.arm == "conadv" else result for result in results]
    told = watch(unknown, out)
    told.ended(finished(unknown[1], results[0]), 30.0)
    assert out.getvalue().splitlines()[-1].endswith("about 2 min left")  # 4 cells of 30 s


def test_a_failure_is_told_and_says_nothing_about_time(results: list[Result]) -> None:
    out = io.StringIO()
    told = watch(results, out)
    told.ended(Result(**{**vars(results[1]), "error": "no such luck"}), 5000.0)
    assert "vanilla · seed 1: failed: no such luck (83 min), about 3 min left" in out.getvalue()


def test_nothing_is_told_when_quiet(results: list[Result]) -> None:
    out = io.StringIO()
    told = watch(results, out, quiet=True)
    told.ended(finished(results[1], results[0]), 30.0)
    told.show([], 1)
    assert out.getvalue() == ""


def test_a_terminal_has_a_bar_below_the_lines(results: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with ProgressBar(0, len(results), False, out, estimates=False) as bar:
        told = SweepProgress(bar, len(results), 2)
        told.begin(results)
        told.show([3.0, 4.0], 2)
    assert "2/6" in out.getvalue() and "2 running, 2 waiting, about 2 min left" in out.getvalue()


def test_a_line_says_that_a_cell_has_started_also_before_any_has_ended(results: list[Result]) -> None:
    out = io.StringIO()
    fresh = [Result(**{**vars(result), "summary": None}) for result in results]
    watch(fresh, out).started("vanilla · seed 0")
    assert out.getvalue() == "6 cells, 1 at a time\n[0/6] vanilla · seed 0: started\n"
    watch(results, out).started("vanilla · seed 1")
    # Two vanilla at 30 s and two conadv at 80 s.
    assert out.getvalue().splitlines()[-1] == "[2/6] vanilla · seed 1: started, about 4 min left"


def test_without_a_terminal_a_long_cell_prints_a_line_now_and_then(
    results: list[Result],
) -> None:
    out = io.StringIO()
    told = watch(results, out)
    told.show([3.0], 3)
    assert len(out.getvalue().splitlines()) == 1
    watch(results, out, seconds=-1.0).show([3.0], 3)
    assert out.getvalue().splitlines()[-1] == "[2/6]  1 running, 3 waiting, about 4 min left"


def test_a_run_without_a_finite_accuracy_is_done(results: list[Result]) -> None:
    out = io.StringIO()
    odd = Result(**{**vars(results[1]), "summary": {"test_top1": None, "seconds": 3.0}})
    watch(results, out).ended(odd, 3.0)
    assert "[3/6] vanilla · seed 1: done (3.0 s)" in out.getvalue()
