"""The best weights of a run by robust accuracy on held-out images, and the warning of a collapse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from conadv import cli, split_batchnorm
from conadv.task.data.arrays import digits
from conadv.trainer.build import build_task
from conadv.trainer.checkpoint import BEST, BEST_BY, BestWeights, read_best
from support import tiny
from support.settings import small_cnn

CPU = torch.device("cpu")
METRIC = BEST_BY[0]


def weight_of(folder: Path) -> float:
    return float(safetensors.torch.load_file(folder / BEST)["7.bias"][0])


def numbered(model: nn.Module, number: float) -> None:
    with torch.no_grad():
        model[7].bias.fill_(number)  # type: ignore[index, union-attr, operator]


def test_it_keeps_the_weights_of_the_best_evaluation_and_warns_once_of_a_collapse(tmp_path: Path) -> None:
    model, said = split_batchnorm(small_cnn()), list[str]()
    best = BestWeights(tmp_path, model, {"width": 4}, said.append)
    for number, accuracy in enumerate([20.0, 40.0, 39.0, 20.5, 19.0, 1.0]):
        numbered(model, number)
        best.log(10 * number, {METRIC: accuracy, "test_top1": 90.0})
        best.log(10 * number + 1, {"loss": 1.0})
        assert len(said) == (number >= 4), "below half of the best"
    assert weight_of(tmp_path) == 1
    assert read_best(tmp_path / BEST).about == {"step": 10, METRIC: 40.0, "format": 3, "network": {"width": 4}}
    assert "fell from 40.0 % (step 10) to 19.0 %" in said[0]
    small_cnn().load_state_dict(safetensors.torch.load_file(tmp_path / BEST))  # of the plain model

    resumed = BestWeights(tmp_path, model, {"width": 4}, said.append)
    numbered(model, 7)
    resumed.log(70, {METRIC: 30.0})
    assert weight_of(tmp_path) == 1
    resumed.log(80, {METRIC: 41.0})
    assert weight_of(tmp_path) == 7


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / BEST).write_bytes(b"nothing")
    model = split_batchnorm(small_cnn())
    with pytest.raises(ValueError, match=r"best\.safetensors is damaged"):
        BestWeights(tmp_path, model, {}, print)


def test_held_out_images_are_of_all_classes_and_not_learnt_from() -> None:
    whole, task = (build_task(tiny.recipe(data__train_size=600, data__held_out=count), CPU) for count in (0, 50))
    assert task.held_out is not None
    assert whole.held_out is None
    held, learnt = task.held_out, task.data.train
    assert (len(held), len(learnt)) == (50, 550)
    assert torch.bincount(torch.as_tensor(held.labels)).tolist() == [5] * 10
    parts = [sorted(source.image(index).tobytes() for index in range(len(source))) for source in (held, learnt)]
    everything = sorted(whole.data.train.image(index).tobytes() for index in range(600))
    assert sorted(parts[0] + parts[1]) == everything
    with pytest.raises(ValueError, match=r"batch_size 24 does not fit 1 training images: .*hold out less"):
        build_task(tiny.recipe(data__train_size=600, data__held_out=599), CPU, trains=True)
    with pytest.raises(ValueError, match=r"data.held_out 5000 leaves none of 600 training images: lower it"):
        build_task(tiny.recipe(data__train_size=600, data__held_out=5000), CPU, trains=True)


def test_a_robust_run_has_its_metrics_and_its_best_weights_can_be_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    robust = "--adv-weight 1 --twin-branch main --attack.steps 2 --data.held-out 20 --eval-every 1 --eval-robust 30"
    words = f"train digits --quiet --json --epochs 3 --batch-size 40 --chunk-size 40 {robust} --run {run}"
    assert cli.main(words.split()) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    names = ("adv_top1", "held_out_top1", "held_out_robust_top1", "robust_top1")
    assert all(0 <= summary[name] <= 100 for name in names)
    assert summary["held_out_robust_top1"] <= summary["held_out_top1"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    watched = {line["step"]: line[METRIC] for line in lines if METRIC in line} | {summary["steps"]: summary[METRIC]}
    assert len(watched) == 3
    assert cli.main(["eval", run, "--best", "--robust", "--images", "30", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated[METRIC] == max(watched.values()) == watched[evaluated["best_step"]]
    assert "adv_top1" not in evaluated  # twins went through a branch that the best weights lack
    assert cli.main(["eval", run, "--robust", "--images", "30", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {name: again[name] for name in names} == {name: summary[name] for name in names}


def test_without_held_out_images_test_accuracy_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    words = "train digits --quiet --epochs 3 --eval-every 1 --data.train-size 200 --batch-size 100"
    assert cli.main([*words.split(), "--run", run]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    watched = [line["test_top1"] for line in lines if "test_top1" in line]
    assert len(watched) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    capsys.readouterr()
    assert cli.main(["eval", run, "--best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_top1"] == max(*watched, summary["test_top1"])
    image = tmp_path / "0.png"
    Image.fromarray(digits().test.image(0)[..., 0]).save(image)
    assert cli.main(["predict", f"{run}/{BEST}", str(image), "--top", "10", "--json"]) == 0
    assert {one["class"] for one in json.loads(capsys.readouterr().out)[str(image)]} == set("0123456789")


def test_a_run_that_is_only_evaluated_at_its_end_has_no_best_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert cli.main(f"train digits --quiet --epochs 1 --run {run}".split()) == 0
    assert not (tmp_path / "run" / BEST).exists()
    assert cli.main(["eval", run, "--best"]) == 2
    assert "--eval-every" in capsys.readouterr().err
