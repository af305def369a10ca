"""Training from Python: the same run as the command's, with callbacks, in any thread."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import conadv
from conadv.trainer.metrics import read_metrics
from support import tiny


def recipe(**changes):
    fields = {key.replace("__", "."): value for key, value in changes.items()}
    return conadv.load_recipe("digits", {**tiny.FIELDS, **fields})


def test_callbacks_get_every_metric_of_the_run(tmp_path):
    steps, evaluations = [], []
    summary = conadv.train(
        recipe(eval_every=1), folder=tmp_path / "run", on_step=steps.append, on_evaluation=evaluations.append
    )
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["loss"] for step in steps] == [line["loss"] for line in lines]
    assert [evaluation["step"] for evaluation in evaluations] == [1, 3, 6]
    assert [evaluation["test_top1"] for evaluation in evaluations[:2]] == [lines[1]["test_top1"], lines[3]["test_top1"]]
    last = {name: value for name, value in evaluations[-1].items() if name != "step"}
    assert last.items() <= summary.items()
    assert summary["run"] == str(tmp_path / "run")


def test_the_name_of_a_recipe_is_enough_also_in_a_thread_where_no_signal_handler_can_be_set(tmp_path, capfd):
    own, found = tmp_path / "own.toml", []
    own.write_text("max_steps = 1\nthreads = 1\n")
    thread = threading.Thread(target=lambda: found.append(conadv.train(str(own), folder=str(tmp_path / "run"))))
    thread.start()
    thread.join()
    assert found[0]["steps"] == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("method", "epsilon"), [("vanilla", None), ("sam", None), ("recycled", 8 / 255)])
def test_a_summary_has_the_epsilon_of_methods_that_attack(method, epsilon, tmp_path):
    summary = conadv.train(recipe(method=method, attack__epsilon=8 / 255, max_steps=1), folder=tmp_path / "run")
    assert summary["epsilon"] == epsilon


def test_an_interrupt_saves_and_the_resumed_run_ends_as_if_it_had_not_been(tmp_path, capsys):
    ordinary = conadv.load_recipe("digits", {"epochs": 8, "threads": 1})
    conadv.train(ordinary, folder=tmp_path / "whole")

    def interrupt(metrics):
        if metrics["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # for the thread that reads signals

    with pytest.raises(KeyboardInterrupt):
        conadv.train(ordinary, folder=tmp_path / "run", on_step=interrupt)
    assert "to resume: conadv train --resume" in capsys.readouterr().err
    assert conadv.train(resume=tmp_path / "run")["steps"] == 8
    assert tiny.equal(tiny.state(tmp_path / "run"), tiny.state(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("number", "expected", "meanwhile"),
    [(signal.SIGINT, KeyboardInterrupt, "build.open_task_data"), (signal.SIGTERM, SystemExit, "train.build_job")],
)
def test_an_interrupt_before_the_first_step_is_raised_at_once(number, expected, meanwhile, tmp_path, monkeypatch):
    """In a notebook, the process lives on."""

    def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr(f"conadv.trainer.{meanwhile}", interrupt)
    began = time.monotonic()
    with pytest.raises(expected):
        conadv.train(recipe(), folder=tmp_path / "run")
    assert time.monotonic() - began < 50
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "there is nothing to train: pass a recipe"),
        ({"recipe": "digits", "resume": "run"}, "resume= takes the recipe and the folder from the run"),
        ({"recipe": "digit"}, "did you mean digits"),
    ],
)
def test_misuse_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        conadv.train(**arguments)
    assert "\n" not in str(error.value)
