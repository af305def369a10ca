"""`conadv analyze`: what it writes and skips, by branch, and its one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from conadv import cli
from conadv.config import recipe_of_run
from conadv.task.data.kept import fitted
from conadv.task.evaluate import Evaluation, evaluate
from conadv.task.sharpness import Surface
from conadv.trainer import analysis, trained

FEW = {"images": 20, "eigenvalues": 2, "iterations": 8, "probes": 3, "steps": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("runs")
    for method in ("vanilla", "conadv"):
        words = tiny.words(method=method, epochs=1, ema=0.5 if method == "vanilla" else 0)
        assert cli.main(["train", *words, "--run", str(home / method), "--quiet"]) == 0
    return {method: home / method for method in ("vanilla", "conadv")}


def analyze(run: Path, *words: str, **changes: object) -> int:
    flags = [word for name, value in {**FEW, **changes}.items() for word in (f"--{name}", str(value))]
    return cli.main(["analyze", str(run), "--model", "tiny:net", "--quiet", *flags, *words])


def parts(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "analysis.json").read_text())["parts"])


def test_every_branch_is_measured_and_what_is_there_is_skipped(runs, capsys, monkeypatch):
    run = runs["conadv"]
    assert analyze(run, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    first = parts(run)
    assert list(first) == ["main.sharpness", "main.accuracy", "adv.sharpness", "adv.accuracy"]
    assert printed["main.sharpness.eigenvalues"] == first["main.sharpness"]["eigenvalues"]
    for name in ("main.sharpness", "adv.sharpness"):
        part = first[name]
        assert part["images"] == 20 and len(part["eigenvalues"]) == 2
        assert part["worst_loss"] > part["loss"] > 0
        # The loss cannot rise faster than its slope and the largest curvature allow, but for terms of third order.
        assert part["worst_loss"] - part["loss"] > 0.9 * 0.05 * part["gradient_norm"]
    for name in ("main.accuracy", "adv.accuracy"):
        assert 0 <= first[name]["robust_top1"] <= 100
    monkeypatch.setattr(Surface, "times_hessian", None)  # nothing is computed again
    assert analyze(run) == 0
    assert parts(run) == first
    monkeypatch.undo()
    assert analyze(run, steps=3) == 0
    assert parts(run)["main.sharpness"] == first["main.sharpness"]
    assert parts(run)["main.accuracy"]["settings"]["steps"] == 3
    assert analyze(run, "--again", images=10) == 0
    assert parts(run)["main.sharpness"]["images"] == 10


def test_an_analysis_that_was_stopped_continues_with_the_next_part(runs, monkeypatch):
    run = runs["conadv"]
    (run / "analysis.json").unlink(missing_ok=True)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(analysis, "evaluate", stop)
    assert analyze(run) == 130
    kept = parts(run)
    assert list(kept) == ["main.sharpness"]
    monkeypatch.undo()
    assert analyze(run) == 0
    assert parts(run)["main.sharpness"] == kept["main.sharpness"] and len(parts(run)) == 4


def test_a_moving_average_is_what_is_analyzed(runs):
    run = runs["vanilla"]
    assert analyze(run, images=60, probes=1) == 0
    content = json.loads((run / "analysis.json").read_text())
    assert {**content["about"], "data": None} == {"step": 2, "ema": True, "data": None}
    assert list(content["parts"]) == ["main.sharpness", "main.accuracy"]
    assert content["parts"]["main.sharpness"]["trace_error"] is None
    task, _, ema = trained._trained(recipe_of_run(run, {"model": "tiny:net"}), run)
    images = torch.from_numpy(fitted(task.data.train, np.arange(60), task.augment.fit)).double() / 255
    with ema.swapped_in(), torch.no_grad():
        loss = task.loss(task.model.eval()(images), torch.from_numpy(task.data.train.labels[:60]))
    assert content["parts"]["main.sharpness"]["loss"] == pytest.approx(float(loss), rel=1e-9)


def test_results_of_other_data_are_measured_again(tmp_path, capsys):
    """Also after a move: the same data at another place is the same data."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        arrays = {f"{part}_images": rng.integers(0, 256, (60, 8, 8, 1), np.uint8) for part in ("train", "test")}
        labels = {f"{part}_labels": np.arange(60) % 10 for part in ("train", "test")}
        np.savez(tmp_path / f"{name}.npz", **arrays, **labels)
    shutil.copy(tmp_path / "a.npz", tmp_path / "copy.npz")
    run, words = tmp_path / "run", tiny.words(method="vanilla", epochs=1, data__path=str(tmp_path / "a.npz"))
    assert cli.main(["train", *words, "--run", str(run), "--quiet"]) == 0

    def measured(*words: str) -> dict[str, Any]:
        assert analyze(run, *words) == 0
        return parts(run)

    first = measured()
    other = measured("--data.path", str(tmp_path / "b.npz"))
    assert other["main.sharpness"]["loss"] != first["main.sharpness"]["loss"]
    measured("--data.path", str(tmp_path / "b.npz"), "--again")
    assert measured() == first
    about = json.loads((run / "analysis.json").read_text())["about"]
    assert measured("--data.path", str(tmp_path / "copy.npz")) == first
    assert json.loads((run / "analysis.json").read_text())["about"] == about


def test_precision_and_kernels_are_those_of_the_run(tmp_path, monkeypatch):
    words = tiny.words(method="vanilla", epochs=1, precision="bfloat16", deterministic="true")
    assert cli.main(["train", *words, "--run", str(tmp_path / "run"), "--quiet"]) == 0
    seen = []

    def spy(*inputs: Any, **options: Any) -> Evaluation:
        seen.append((options.get("autocast"), torch.are_deterministic_algorithms_enabled()))
        return evaluate(*inputs, **options)

    monkeypatch.setattr(analysis, "evaluate", spy)
    assert analyze(tmp_path / "run") == 0
    assert seen == [(torch.bfloat16, True)]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"images": 0}, "--images 0: take at least 1"),
        ({"eigenvalues": 9}, "take at least the 9 of --eigenvalues"),
        ({"rho": 0}, "--rho 0.0: a length above 0"),
        ({"epsilon": "x"}, "epsilon"),
        ({"seed": 1}, "--seed"),
    ],
)
def test_bad_input_gets_one_line(changes, says, runs, capsys):
    before = (runs["vanilla"] / "analysis.json").exists()
    assert analyze(runs["vanilla"], **changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line
    assert (runs["vanilla"] / "analysis.json").exists() == before


def test_a_damaged_file_is_named(runs, capsys):
    (runs["vanilla"] / "analysis.json").write_text('{"parts": 3}')
    assert analyze(runs["vanilla"]) == 2
    assert "analysis.json is damaged: remove it, or add --again" in capsys.readouterr().err
    assert analyze(runs["vanilla"], "--again") == 0


def test_a_folder_that_is_no_run_gets_one_line(tmp_path, capsys):
    assert analyze(tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_one_of_each_is_enough():
    assert analysis.Analysis(images=1, eigenvalues=1, iterations=1, probes=1, steps=1).images == 1
