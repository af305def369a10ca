"""Sweeps: each missing cell once, whatever stops them."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conadv import cli
from conadv.config import dump_recipe, load_recipe
from conadv.study import sweep as sweeping
from conadv.study.results import read_origins, read_results
from conadv.study.study_file import read_study
from support.waiting import until

TIMING = ("seconds", "images_per_second")


def lines(folder: Path) -> list[dict[str, Any]]:
    """results.jsonl without what depends on the clock, and without commits, which only a sweep knows."""
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in found:
        del line["commit"]
        if line["summary"]:
            line["summary"] = {key: value for key, value in line["summary"].items() if key not in TIMING}
    return found


@pytest.fixture
def fake_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In place of conadv train: a program that does what the seed of its cell says, and heartbeats each start."""
    program = tmp_path / "fake.py"
    program.write_text(
        """
import json, os, signal, sys, time
from pathlib import Path
words = sys.argv[1:]
resumes = "--resume" in words
home = Path(words[words.index("--resume" if resumes else "--run-dir") + 1])
if resumes:
    seed = int(home.name.split("seed")[1].split("-")[0])
else:
    seed = int(words[words.index("--seed") + 1])
home.mkdir(parents=True, exist_ok=True)
with open(Path(__file__).with_name("starts"), "a") as starts:
    starts.write(json.dumps([seed, resumes, sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]]) + "\\n")
(home / "checkpoints").mkdir(exist_ok=True)
if seed == 7:
    print("error: no such luck", file=sys.stderr)
    sys.exit(1)
if seed == 8:
    raise RuntimeError("a fault of ours")
if seed == 9:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 6:
    time.sleep(60)
(home / "summary.json").write_text(json.dumps({"test_top1": 50.0 + seed, "seconds": 1.0, "gap": float("nan")}))
""",
        encoding="utf-8",
    )
    # `python -m conadv ...` becomes the program.
    monkeypatch.setattr(sys, "executable", str(_interpreter(tmp_path, program)))
    return tmp_path / "starts"


def _interpreter(folder: Path, program: Path) -> Path:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 3\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program))} "$@"\n')
    script.chmod(0o755)
    return script


def starts(noted: Path) -> list[list[Any]]:
    return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def seeds(folder: Path, *chosen: int, base: str = "", top: str = "") -> Path:
    path = folder / "seeds.toml"
    path.write_text(f"{top}\n[base]\nmax_steps = 2\n{base}\n[grid]\nseed = {list(chosen)}\n", encoding="utf-8")
    return path


def sweep(study: Path, out: Path, *words: str) -> int:
    return cli.main(["sweep", str(study), "--out", str(out), *words])


def begin(home: Path, **changes: Any) -> None:
    """A run that was started there, and not finished."""
    home.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe("digits", {"seed": 1, "max_steps": 2, **changes})
    (home / "config.toml").write_text(dump_recipe(recipe), encoding="utf-8")


@pytest.mark.slow
def test_killed_twice_and_started_again_it_gives_what_an_undisturbed_one_gives(tmp_path: Path) -> None:
    study, out = tmp_path / "study.toml", tmp_path / "out"
    base, grid = "max_steps = 20\ncheckpoint.every = 5", 'method = ["conadv", "recycled"]'
    study.write_text(f"[base]\n{base}\n[grid]\n{grid}\n", encoding="utf-8")
    cells = read_study(study).cells

    command = [sys.executable, "-m", "conadv", "sweep", str(study), "--out", str(out), "--jobs", "1"]
    for cell in cells:  # killed in the middle of each cell
        home = out / "runs" / cell.cell
        with subprocess.Popen(command) as process:
            until(lambda home=home: any((home / "checkpoints").glob("step-*")))
            process.send_signal(signal.SIGKILL)
        assert not (home / "summary.json").exists()
    assert subprocess.run(command, check=False).returncode == 0

    # The undisturbed one: the cells as their commands say, in this process, and a sweep that finds all of them done.
    still = tmp_path / "still"
    for line in lines(out):
        words = shlex.split(line["command"])[1:]
        assert cli.main([*words, "--quiet", "--run", str(still / "runs" / line["cell"])]) == 0
    assert sweep(study, still) == 0
    assert lines(out) == lines(still)
    assert all(line["summary"]["steps"] == 20 for line in lines(out))


def test_a_cell_that_fails_is_recorded_and_tried_again_but_ends_nothing(fake_train: Path, tmp_path: Path) -> None:
    study, out = seeds(tmp_path, 7, 8, 9, 1), tmp_path / "out"
    assert sweep(study, out) == 1
    results = read_results(out)
    errors = ["no such luck", "RuntimeError: a fault of ours", "killed by SIGKILL", None]
    assert [result.error for result in results] == errors
    assert results[3].summary == {"test_top1": 51.0, "seconds": 1.0, "gap": None}
    assert sweep(study, out) == 1
    assert sorted(seed for seed, *_ in starts(fake_train)) == [1, 7, 7, 8, 8, 9, 9]
    assert read_results(out) == results


@pytest.mark.parametrize("count", [1, 2])
def test_cells_run_on_as_many_cores_of_their_own_as_they_have_threads(
    fake_train: Path, tmp_path: Path, count: int
) -> None:
    usable = os.sched_getaffinity(0)
    base = "threads = 2" if count == 2 else ""  # 1 is the default
    assert sweep(seeds(tmp_path, 0, 1, 2, base=base), tmp_path / "out") == 0
    for _, _, cores, threads in starts(fake_train):
        assert len(cores) == min(count, len(usable)) and set(cores) <= usable and threads == str(count)


def test_two_arms_with_the_same_values_are_two_cells(fake_train: Path, tmp_path: Path) -> None:
    study = tmp_path / "twins.toml"
    study.write_text('arm = [{name = "a"}, {name = "b"}]\n[grid]\nseed = [1]\n', encoding="utf-8")
    assert sweep(study, tmp_path / "out") == 0
    assert [(cell.arm, cell.summary is None) for cell in read_results(tmp_path / "out")] == [("a", False), ("b", False)]


def test_a_cell_goes_on_where_a_run_has_begun(fake_train: Path, tmp_path: Path) -> None:
    study, out = seeds(tmp_path, 1, 2), tmp_path / "out"
    first, _ = read_study(study).cells
    begin(out / "runs" / first.cell)
    assert sweep(study, out, "--jobs", "1") == 0
    assert [(seed, resumes) for seed, resumes, *_ in starts(fake_train)] == [(1, True), (2, False)]


def test_a_run_of_another_recipe_is_not_taken_for_the_cell(
    fake_train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = seeds(tmp_path, 1), tmp_path / "out"
    (cell,) = read_study(study).cells
    begin(out / "runs" / cell.cell, epochs=77)
    assert sweep(study, out) == 2
    assert "epochs 77" in capsys.readouterr().err
    assert starts(fake_train) == []


def test_cells_that_left_the_study_are_left_alone_and_not_listed(fake_train: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert sweep(seeds(tmp_path, 1, 2), out) == 0
    gone = read_results(out)[0].cell
    assert sweep(seeds(tmp_path, 3, 2), out) == 0
    assert [result.values["seed"] for result in read_results(out)] == [3, 2]
    assert (out / "runs" / gone / "summary.json").exists()
    assert sorted(seed for seed, *_ in starts(fake_train)) == [1, 2, 3]


@pytest.fixture
def copied(tmp_path: Path, fake_train: Path) -> Path:
    """A folder with the results of seeds 1 and 2, but without their runs; what was started is forgotten."""
    first, out = tmp_path / "first", tmp_path / "out"
    assert sweep(seeds(tmp_path, 1, 2), first) == 0
    out.mkdir()
    shutil.copy(first / "results.jsonl", out)
    fake_train.unlink()
    return out


def rewrite_lines(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = out / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_cell_whose_results_were_copied_is_done_without_a_run_folder(
    fake_train: Path, copied: Path, tmp_path: Path
) -> None:
    rewrite_lines(copied, lambda line: line.update(commit="aaaa", arm="another name", cell="another"))
    assert sweep(seeds(tmp_path, 1, 2), copied) == 0
    assert starts(fake_train) == [] and not (copied / "origin.json").exists()  # nothing was run here
    assert sweep(seeds(tmp_path, 1, 2, 3), copied) == 0
    assert [seed for seed, *_ in starts(fake_train)] == [3]
    results = read_results(copied)
    assert [(result.summary or {})["test_top1"] for result in results] == [51.0, 52.0, 53.0]
    assert [result.arm for result in results] == ["conadv"] * 3
    (origin,) = read_origins(copied)
    assert [result.commit for result in results] == ["aaaa", "aaaa", origin["commit"]]


@pytest.mark.parametrize("begun", [False, True])
def test_a_line_without_a_summary_does_not_count_and_a_run_that_has_begun_counts_more(
    fake_train: Path, copied: Path, tmp_path: Path, begun: bool
) -> None:
    if begun:
        begin(copied / "runs" / read_results(copied)[0].cell)
    else:
        rewrite_lines(copied, lambda line: line.update(summary=None) if line["values"]["seed"] == 1 else None)
    assert sweep(seeds(tmp_path, 1, 2), copied) == 0
    assert [(seed, resumes) for seed, resumes, *_ in starts(fake_train)] == [(1, begun)]


def test_results_of_a_version_with_other_fields_count_unless_the_study_sets_them(
    fake_train: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_older(line: dict[str, Any]) -> None:
        line["values"].update(diagnose=0, gone=7)
        del line["values"]["deterministic"], line["commit"]

    rewrite_lines(copied, make_older)
    assert sweep(seeds(tmp_path, 1, 2), copied) == 0
    assert starts(fake_train) == []
    assert [result.commit for result in read_results(copied)] == [None, None]
    capsys.readouterr()
    assert (
        sweep(seeds(tmp_path, 1, 2, base="deterministic = true"), copied) == 2
    )  # other cells; the lines would be lost
    rewrite_lines(copied, lambda line: line["overrides"].update(gone="7"))
    assert sweep(seeds(tmp_path, 1, 2), copied) == 2
    assert capsys.readouterr().err.count("finished cells without a run folder") == 2


def test_a_run_that_another_version_finished_counts_and_one_that_it_began_is_refused(
    fake_train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = seeds(tmp_path, 1), tmp_path / "out"
    assert sweep(study, out) == 0
    home = out / "runs" / read_results(out)[0].cell
    (home / "config.toml").write_text("gone = 3\n", encoding="utf-8")
    assert sweep(study, out) == 0
    assert len(starts(fake_train)) == 1
    (home / "summary.json").unlink()
    capsys.readouterr()
    assert sweep(study, out) == 2
    assert "unknown field 'gone'" in capsys.readouterr().err


def test_each_cell_that_ends_is_a_line_with_the_time_left(
    fake_train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, out = seeds(tmp_path, 1, 7, 2), tmp_path / "out"
    assert sweep(study, out, "--jobs", "1") == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "3 cells, 1 at a time, 0 are already done"
    assert lines[0].startswith("[1/3] conadv · seed 1: 51.00 % (") and lines[0].endswith("about 2.0 s left")
    assert lines[1].startswith("[2/3] conadv · seed 7: failed: no such luck (")
    assert lines[2].startswith("[3/3] conadv · seed 2: 52.00 % (") and "left" not in lines[2]
    assert sweep(study, out, "--jobs", "1") == 1
    assert capsys.readouterr().err.startswith("3 cells, 1 at a time, 2 are already done, about 1.0 s left\n")
    assert sweep(study, out, "--quiet", "--json") == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    told = {"study": "seeds", "cells": 3, "done": 2, "failed": 1, "results": str(out / "results.jsonl")}
    assert json.loads(printed.out) == told


def test_copied_results_that_are_damaged_or_not_in_the_study_are_not_overwritten(
    fake_train: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / "results.jsonl"
    first, second = path.read_text(encoding="utf-8").splitlines(keepends=True)
    capsys.readouterr()

    def refused(*chosen: int) -> str:
        before = path.read_bytes()
        assert sweep(seeds(tmp_path, *chosen), copied) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and path.read_bytes() == before and starts(fake_train) == []
        return message

    assert "(1, such as 'conadv · seed 1')" in refused(2, 3)
    path.write_text(first.replace('"cell"', '"call"') + second, encoding="utf-8")
    message = refused(1, 2)
    assert "line 1 of" in message and "remove it" in message
    path.write_text(second, encoding="utf-8")  # as the line says
    assert sweep(seeds(tmp_path, 1, 2), copied) == 0
    assert [seed for seed, *_ in starts(fake_train)] == [1]


@pytest.mark.parametrize(("word", "kept"), [("false", [False, False]), ("true", [True, True])])
def test_checkpoints_go_unless_the_study_keeps_them(
    fake_train: Path, tmp_path: Path, word: str, kept: list[bool]
) -> None:
    out = tmp_path / "out"
    assert sweep(seeds(tmp_path, 1, 2, top=f"keep_checkpoints = {word}"), out) == 0
    assert [(out / "runs" / result.cell / "checkpoints").exists() for result in read_results(out)] == kept


def test_asked_to_stop_it_stops_its_cells_and_keeps_what_is_done(
    fake_train: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    study, out = seeds(tmp_path, 1, 6), tmp_path / "out"
    child = os.fork()
    if not child:  # this process has the stand-in for conadv train, which a new one would not have
        os._exit(sweep(study, out, "--jobs", "1"))
    until(lambda: [seed for seed, *_ in starts(fake_train)] == [1, 6])
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert "stopping: the running cells save a checkpoint; the same command resumes them" in capfd.readouterr().err
    done, stopped = read_results(out)
    assert (done.summary or {})["test_top1"] == 51.0
    assert (stopped.summary, stopped.error) == (None, None)
    assert [cell.cell for cell in read_study(study).cells] == [done.cell, stopped.cell]


def test_two_sweeps_do_not_share_a_folder(
    fake_train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweeping, "_PATIENCE", 0.0)
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert sweep(seeds(tmp_path, 1), out) == 2
    assert "another sweep is running" in capsys.readouterr().err


def test_bad_flags_and_folders_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out, jobs, told in (("out", "0", "jobs"), ("file", "1", "choose another")):
        assert sweep(seeds(tmp_path, 1), tmp_path / out, "--jobs", jobs) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and told in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("base", "every"), [("", "200"), ("checkpoint.every = 5", "5")])
def test_checkpoints_are_few_unless_the_study_says_otherwise(tmp_path: Path, base: str, every: str) -> None:
    words = sweeping.train_words(read_study(seeds(tmp_path, 0, base=base)).cells[0], tmp_path / "run")
    assert words[:2] == ["train", "digits"] and words[-2:] == ["--run-dir", str(tmp_path / "run")]
    assert words.count("--checkpoint.every") == 1 and words[words.index("--checkpoint.every") + 1] == every


def test_a_log_that_points_elsewhere_is_replaced(tmp_path: Path) -> None:
    """As in a study of someone else's: the output would be written over a file of the user's."""
    notes, log = tmp_path / "notes", tmp_path / "logs" / "cell.txt"
    notes.write_text("mine", encoding="utf-8")
    log.parent.mkdir()
    log.symlink_to(notes)
    assert sweeping.start(["echo", "output"], log, frozenset({0}), 1).wait() == 0
    assert (notes.read_text(encoding="utf-8"), log.read_text(encoding="utf-8")) == ("mine", "output\n")
