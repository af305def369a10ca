"""One GPU: repeatable numbers, no hidden waits, the same random starts as on the CPU, exact resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from conadv.core.seeds import centered
from conadv.optim.base import parameter_groups
from conadv.optim.lars import Lars
from conadv.ranks.layout import Layout
from conadv.ranks.member import Member
from conadv.ranks.world import World
from conadv.task.models import build_model
from support import tiny

CUDA = torch.device("cuda", 0)


def conadv_train(*words: str, **variables: str) -> None:
    """`conadv train` in a process of its own, since cuBLAS reads its settings once."""
    path = f"{Path(tiny.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "conadv", "train", *words, "--quiet"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, **variables}, timeout=280)


def train(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """The state after a run."""
    conadv_train(*tiny.words(**{"precision": "float32", **changes}), "--run", str(folder))
    return tiny.state(folder)


@pytest.mark.parametrize("method", ["vanilla", "conadv", "recycled"])
def test_a_deterministic_run_repeats_bit_for_bit(method, tmp_path):
    one, other = (train(tmp_path / name, method=method, deterministic="true") for name in ("one", "other"))
    assert tiny.equal(one, other)


@pytest.mark.parametrize("method", ["conadv", "recycled"])
def test_a_resumed_run_is_the_same_bit_for_bit(method, tmp_path):
    changes = {"method": method, "deterministic": "true"}
    whole = train(tmp_path / "whole", **changes)
    train(tmp_path / "part", **changes, max_steps=3)
    conadv_train("--resume", str(tmp_path / "part"), "--model", "support.tiny:net", "--max-steps", "none")
    assert tiny.equal(tiny.state(tmp_path / "part"), whole)


def test_random_starts_are_those_of_the_cpu():
    images = torch.rand(4, 3, 32, 32)
    assert torch.equal(centered(images.shape, 7, images), centered(images.shape, 7, images.to(CUDA)).cpu())


@pytest.mark.parametrize("method", ["vanilla", "conadv", "recycled", "sam"])
def test_no_pass_and_no_update_waits_for_the_device(method):
    """After the first steps, in which misuse is looked for, PyTorch raises an error at anything that synchronizes."""
    info = METHODS[method]
    model = split_batchnorm(build_model("resnet8", classes=10, in_channels=3), info.branches).to(CUDA)
    options = {"attack": PGD(4 / 255), "delay": info.default_delay, "adv_weight": 0.5, "rho": 0.05}
    step_of = info.build(model, F.cross_entropy, options, seed=0)
    optimizer = Lars(parameter_groups(model, 5e-4), lr=0.1)
    member = Member(World(0, 1, CUDA), Layout.fit(None, info.duties, 1), model, step_of, chunks=1)
    batch = torch.rand(8, 3, 32, 32).pin_memory(), torch.randint(10, (8,)).pin_memory()
    for number in range(6):
        torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
        try:
            optimizer.zero_grad()
            unread = member.step(batch, None)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert unread.read().signal == 0


def test_losses_are_those_of_the_cpu_to_a_few_digits(tmp_path):
    train(tmp_path / "gpu", method="conadv", deterministic="true")
    words = tiny.words(precision="float32", method="conadv")
    conadv_train(*words, "--run", str(tmp_path / "cpu"), CUDA_VISIBLE_DEVICES="")
    files = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("gpu", "cpu")]
    one, other = ([json.loads(line)["loss"] for line in lines] for lines in files)
    assert one == pytest.approx(other, rel=1e-2)
