"""The moving average of the weights, against PyTorch's, and where it is evaluated and exported."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conadv.core.splitbn import split_batchnorm
from conadv.ranks.world import World
from conadv.trainer.build_task import build_task
from conadv.trainer.ema import Ema
from conadv.trainer.evaluation import evaluate_task
from conadv.trainer.trained import evaluate, export
from conadv.trainer.training import train
from support import tiny


def move(model: nn.Module) -> None:
    """A step of a training: all weights and statistics change."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model(torch.randn(4, 3, 5, 5))


def make() -> nn.Module:
    torch.manual_seed(0)
    return split_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), ("main", "adv"))


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_it_is_the_average_of_pytorch(decay):
    model = make()
    ema, theirs = Ema(model, decay), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    theirs.update_parameters(model)  # which only copies the first time: both start at the first weights
    for _ in range(5):
        move(model)
        ema.update()
        theirs.update_parameters(model)
        expected = theirs.module.state_dict()
        assert ema.tensors().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in ema.tensors().items())


def test_the_model_is_lent_the_average_and_gets_its_own_weights_back():
    model = make()
    ema = Ema(model, 0.9)
    move(model)
    ema.update()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = {name: tensor.clone() for name, tensor in ema.tensors().items()}
    with ema.swapped_in():
        assert all(torch.equal(tensor, average[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(own["0.weight"], average["0.weight"])


def test_without_a_decay_there_is_none():
    model = make()
    ema = Ema(model, 0.0)
    before = model[0].weight.detach().clone()
    ema.update()
    ema.load({})
    with ema.swapped_in():
        assert torch.equal(model[0].weight, before)
    assert not ema
    assert ema.tensors() == {}


def test_a_run_is_evaluated_and_exported_with_its_average(tmp_path):
    run = tmp_path / "run"
    learning = {"method": "vanilla", "epochs": 8, "chunk_size": 24, "optimizer.name": "adamw", "optimizer.lr": 0.01}
    recipe = tiny.recipe(ema=0.7, **learning)
    summary = train(recipe, run, None, quiet=True)
    state = tiny.state(run)

    def test_top1(prefix: str) -> float:
        task = build_task(recipe, torch.device("cpu"))
        weights = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        task.model.load_state_dict(weights)
        return evaluate_task(task, World(0, 1, task.device), Ema(task.model, 0))["test_top1"]

    assert summary["ema"] == 0.7
    assert (summary["test_top1"], summary["raw_test_top1"]) == (test_top1("ema."), test_top1("model."))
    assert summary["test_top1"] != summary["raw_test_top1"]
    assert json.loads((run / "summary.json").read_text())["raw_test_top1"] == summary["raw_test_top1"]
    again = evaluate(recipe, run, None)
    assert {key: again[key] for key in ("test_top1", "raw_test_top1", "train_top1")} == {
        key: summary[key] for key in ("test_top1", "raw_test_top1", "train_top1")
    }
    without = train(tiny.recipe(max_steps=1), tmp_path / "without", None, quiet=True)
    assert not without.keys() & {"ema", "raw_test_top1"}
    assert not any(name.startswith("ema.") for name in tiny.state(tmp_path / "without"))
    assert export(tmp_path / "without", tmp_path / "out.safetensors")["weights"] == "raw"
    for raw, prefix, kind in ((False, "ema.", "moving average"), (True, "model.", "raw")):
        assert export(run, tmp_path / "out.safetensors", raw)["weights"] == kind
        for name, tensor in safetensors.torch.load_file(tmp_path / "out.safetensors").items():
            assert torch.equal(tensor, state[prefix + name])


def test_a_folder_without_a_run_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        export(tmp_path, tmp_path / "out.safetensors")
