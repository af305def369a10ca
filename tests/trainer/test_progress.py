"""What a run prints while it trains, where there is no terminal: plain lines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from conadv import cli
from conadv.trainer.progress import ProgressLines
from support import tiny


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    """As in the log of a batch job, which is read while the job runs."""
    with (tmp_path / "log").open("w") as stream:
        ProgressLines(2, quiet=False, stream=stream).say("a line")
        assert (tmp_path / "log").read_text() == "a line\n"


def test_an_evaluation_and_the_last_step_are_printed_unless_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressLines(4, quiet=False)
    bar.log(0, {"loss": 2.5, "lr": 0.1})
    bar.log(1, {"loss": 1.25, "lr": 0.1, "test_top1": 87.5, "train_top1": 90.0, "gap": 2.5})
    assert capsys.readouterr().err == "step 2/4  test_top1 87.50 %, train_top1 90.00 %\n"
    bar.log(3, {"loss": 1.25, "lr": 0.1, "attackers": 2.0})
    assert capsys.readouterr().err == "step 4/4  loss 1.2500  lr 0.1  attackers 2\n"
    bar = ProgressLines(2, quiet=True)
    bar.log(1, {"loss": 1.25, "lr": 0.1, "test_top1": 87.5})
    assert capsys.readouterr().err == ""


def test_a_long_run_prints_ever_fewer_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(10**6))  # each look at it is a second later
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    lines = ProgressLines(10**6, quiet=False)
    for step in range(20_000):
        lines.log(step, {"loss": 2.5, "lr": 0.1})
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    pauses = [later - earlier for earlier, later in pairwise(steps)]
    assert pauses[0] <= 6 and pauses[-1] > 300


def test_a_run_prints_every_evaluation_but_the_last_which_is_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *tiny.words(eval_every=1), "--run-dir", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert [line.split()[1] for line in told.splitlines() if "test_top1" in line] == ["2/6", "4/6"]
