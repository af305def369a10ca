"""`--clip-norm`, by the distance that one step of SGD moves the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conadv.trainer.train import train_recipe as train
from support import tasks, tiny

RATE = 0.125


def moved(folder: Path, clip_norm: float, method: str) -> Tensor:
    """How far one step of plain SGD with RATE moves the trained weights, as one vector."""
    ends = []
    for rate in (RATE, 2 * RATE):
        sgd = {"optimizer__name": "sgd", "optimizer__momentum": 0, "optimizer__weight_decay": 0, "optimizer__lr": rate}
        recipe = tiny.recipe(
            method=method,
            max_steps=1,
            schedule__warmup_epochs=0,
            schedule__decay="constant",
            clip_norm=clip_norm,
            **sgd,
        )
        run = folder / f"{clip_norm}-{rate}"
        train(recipe, run, None, quiet=True)
        weights = {name: tensor for name, tensor in tiny.state(run).items() if name.startswith("model.")}
        trained = [name for name in weights if name.endswith(("weight", "bias"))]
        ends.append(torch.cat([weights[name].flatten() for name in sorted(trained)]))
    return ends[1] - ends[0]


@pytest.mark.parametrize("method", ["vanilla", "conadv"])
def test_a_long_gradient_is_scaled_to_the_norm_and_a_short_one_stays(method, tmp_path):
    free = moved(tmp_path, 0, method)
    norm = float(free.norm()) / RATE
    assert torch.equal(moved(tmp_path, 2 * norm, method), free)
    clipped = moved(tmp_path, norm / 4, method)
    assert float(clipped.norm()) == pytest.approx(RATE * norm / 4, rel=1e-5)  # PyTorch adds 1e-6 to the norm
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-7, atol=1e-12)


def test_the_norm_is_of_the_sum_over_the_ranks(pool, tmp_path):
    states = []
    for ranks, layout in ((1, "none"), (3, "clean | adv | attack")):
        changes = {"clip_norm": 0.01, "layout": layout, "optimizer__name": "sgd"}
        assert pool.run(ranks, tasks.train, str(tmp_path / str(ranks)), False, changes) == [0] * ranks
        states.append(tiny.state(tmp_path / str(ranks)))
    assert tiny.distance(*states) < 1e-12
