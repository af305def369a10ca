"""Twins for a part of the run only, and gradients of BatchNorm rescaled to those of vanilla."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conadv import PGD, ConAdv, cli, split_batchnorm
from conadv.config import load_recipe
from conadv.ranks.world import World
from conadv.trainer.build import build_job, build_task, check_fit
from conadv.trainer.loop import scale_norms
from support import tiny
from support.settings import small_batches, small_cnn


@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_rescaled_gradients_are_those_of_vanilla_where_twins_are_the_images(weight: float) -> None:
    batch = small_batches(1)[0]
    plain = small_cnn()
    F.cross_entropy(plain(batch[0]), batch[1]).backward()
    model = split_batchnorm(small_cnn())
    ConAdv(model, F.cross_entropy, PGD(0, random_start=0), adv_weight=weight)(batch)
    scale_norms(model, weight)
    for place in (0, 3, 7):
        torch.testing.assert_close(model[place].weight.grad, plain[place].weight.grad, rtol=0, atol=1e-12)
    for place in (1, 4):
        for own in (model[place], model[place].adv):
            torch.testing.assert_close(own.weight.grad, plain[place].weight.grad, rtol=0, atol=1e-12)
            torch.testing.assert_close(own.bias.grad, plain[place].bias.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("branches", "shares"),
    [
        (("main", "adv"), {"main": 0.75, "adv": 0.25}),
        (("main", "aug", "adv"), {"main": 0.375, "aug": 0.375, "adv": 0.25}),
        (("main",), {"main": 1.0}),  # twins go through main, too
    ],
)
def test_a_gradient_is_divided_by_the_share_of_its_branch(branches: tuple[str, ...], shares: dict[str, float]) -> None:
    model = split_batchnorm(small_cnn(), branches)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scale_norms(model, 0.25)
    for name in branches:
        weight = model[1].owner(name).weight
        assert torch.equal(weight.grad, torch.full_like(weight, 1 / shares[name]))


@pytest.mark.parametrize("method", ["conadv", "recycled"])
def test_after_adv_until_a_run_learns_from_the_images_alone(method: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = tiny.words(method=method, epochs=6, adv_until="1/2", adv_weight=0.25, twin_branch="main")
    assert cli.main(["train", *words, "--quiet", "--run", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    half = len(lines) // 2
    for number, line in enumerate(lines):
        weight = 0.25 if number < half else 0.0
        assert line["loss"] == pytest.approx((1 - weight) * line["clean_loss"] + weight * line["adv_loss"], abs=1e-12)
    assert [line["clean_loss"] for line in lines] == pytest.approx(plain_losses(method, half, len(lines)), abs=1e-9)


def plain_losses(method: str, half: int, steps: int) -> list[float]:
    """The clean losses of the same run by hand: the weight of the twins is set to 0 in the middle."""
    recipe = tiny.recipe(method=method, epochs=6, adv_weight=0.25, twin_branch="main")
    device = torch.device("cpu")
    task = build_task(recipe, device, trains=True)
    job = build_job(task, check_fit(recipe, 1), World(0, 1, device), start=0)
    losses = []
    for step, batch in enumerate(job.stream.batches(0, steps)):
        job.method.adv_weight = 0.25 if step < half else 0.0
        job.optimizer.zero_grad()
        for group in job.optimizer.param_groups:
            group["lr"] = job.rate(step)
        losses.append(float(job.method(batch).clean))
        job.optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adv_weight": "1", "twin_branch": "main", "adv_until": "1/2"}, "adv_until ends that"),
        ({"scale_norms": "yes", "optimizer.name": "muon"}, "scale_norms changes nothing"),
        ({"data.copies": "2", "batch_size": "96", "chunk_size": "96"}, "1 chunks per batch cannot hold 2 copies"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_recipe("digits", changes)
