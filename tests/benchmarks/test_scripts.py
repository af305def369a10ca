"""The scripts run as their first lines say, compare the same work, and refuse bad input. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attack
import data
import layout
import step

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--model", "resnet8", "--width", "4", "--chunk-size", "4", "--image-size", "8"]


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_json_is_all_there_is_on_standard_output() -> None:
    done = run("step", *SMALL, "--rounds", "2", "--json")
    found = json.loads(done.stdout)
    names = ["vanilla/plain", *(f"{name}/vanilla" for name in ("disadv", "conadv", "recycled", "sam"))]
    assert [ratio["name"] for ratio in found["ratios"]] == names
    assert found["facts"]["recycled by FLOPs"] == pytest.approx(6 / 3, rel=0.1)
    assert found["facts"]["conadv by FLOPs"] == pytest.approx(8 / 3, rel=0.1)


def test_foolbox_and_ours_make_the_same_twins() -> None:
    batch = step.chunk(6, 8)
    runs = attack.attacks(step.network("resnet8", 4).eval(), batch)
    ours = runs["pgd"]()
    assert (ours - batch[0]).abs().max() > 0
    torch.testing.assert_close(ours, runs["foolbox-unchecked"]())
    torch.testing.assert_close(ours, runs["foolbox"]()[1])


def test_both_loaders_give_all_images(tmp_path: Path) -> None:
    files = data.make_images(tmp_path, 8, [(30, 40)])
    batches = list(data.plain(files, 16, 4, 0))
    assert [batch.shape for batch in batches] == [(4, 3, 16, 16)] * 2 and batches[0].dtype == torch.uint8
    assert data.ours(tmp_path, 16, 4, 0) == 8


def test_a_layout_is_timed_by_its_median_step(tmp_path: Path) -> None:
    fields = {"model": "resnet8", "width": 4, "chunk_size": 4, "batch_size": 4, "max_steps": 8, "epochs": 8}
    fields |= {"data.name": "synthetic", "data.train_size": 8, "schedule.warmup_epochs": 0}
    assert layout.train(tmp_path / "run", 1, "vanilla", "clean", fields) > 0
