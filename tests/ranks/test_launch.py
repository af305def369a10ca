"""Ranks by torchrun's variables: the GPU of each, and the command that starts as many again."""

from __future__ import annotations

import re

import pytest
import torch

from conadv.ranks.launch import launcher_command, world_size
from conadv.ranks.world import own_device

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The variables of a case, and no others."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "gpus", "own"),
    [
        ({}, 8, 0),
        ({"LOCAL_RANK": "3"}, 8, 3),
        ({"LOCAL_RANK": "3"}, 1, 0),  # a launcher that shows each process its own GPU alone
    ],
    indirect=["variables"],
)
def test_each_process_takes_its_own_gpu(variables, gpus, own, monkeypatch):
    assert device_of(gpus, monkeypatch) == torch.device("cuda", own)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "which of the 8 GPUs is this rank's? set LOCAL_RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "which of the 8 GPUs is this rank's? set LOCAL_RANK"),
        ({"LOCAL_RANK": "8"}, "process 8 of this machine has no GPU of its own among 8"),
    ],
    indirect=["variables"],
)
def test_a_process_without_a_gpu_of_its_own_is_refused(variables, words, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(words)):
        device_of(8, monkeypatch)


def device_of(gpus: int, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device that a process takes on a machine with so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert own_device() == taken[0]
    return taken[0]


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({}, ""),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nnodes 2 --nproc-per-node 4 -m "),
        ({"RANK": "1", "WORLD_SIZE": "3"}, "torchrun --nproc-per-node 3 -m "),
    ],
    ids=["alone", "two nodes", "by hand"],
    indirect=["variables"],
)
def test_the_command_to_resume_starts_as_many_ranks(variables, command):
    assert launcher_command() == command


@pytest.mark.parametrize("variables", [{"SLURM_STEP_NUM_TASKS": "8"}], indirect=True)
def test_tasks_of_srun_that_do_not_know_their_rank_are_refused(variables, monkeypatch):
    """Otherwise each would train a model of its own."""
    with pytest.raises(ValueError, match="srun started 8 processes that do not know their rank"):
        world_size()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert world_size() == 1
