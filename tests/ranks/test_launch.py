"""Ranks by the variables of their launcher: torchrun's, or SLURM's where those are absent."""

from __future__ import annotations

import re

import pytest
import torch

from conadv.ranks.launch import adopt_slurm, first_host, launcher_command
from conadv.ranks.world import own_device

TASK = {
    "SLURM_JOB_ID": "91234", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODELIST": "gpu[007-009,12]", "SLURM_STEP_NODELIST": "gpu[008-009]",
}  # fmt: skip
TORCHRUN_TWICE = "torchrun --nnodes 2 --nproc-per-node 4 -m "


def adopted(given: dict[str, str]) -> dict[str, str]:
    """The variables, with torchrun's for a task of srun."""
    environment = dict(given)
    adopt_slurm(environment)
    return environment


def test_a_task_of_srun_is_a_rank():
    environment = adopted(TASK)
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu008",
    }
    assert 1024 < int(environment["MASTER_PORT"]) < 32768  # below the ports that a kernel gives to clients


def test_all_tasks_of_a_step_have_one_port_and_another_step_another():
    ports = {adopted({**TASK, "SLURM_PROCID": str(rank)})["MASTER_PORT"] for rank in range(8)}
    assert len(ports) == 1
    assert adopted({**TASK, "SLURM_STEP_ID": "1"})["MASTER_PORT"] not in ports


def test_what_is_set_by_hand_stays():
    environment = adopted({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["RANK"]) == ("10.0.0.1", "4000", "5")


@pytest.mark.parametrize("given", [{"RANK": "0"}, {"WORLD_SIZE": "2", "RANK": "1"}])
def test_under_torchrun_slurm_says_nothing(given):
    assert adopted({**TASK, **given}) == {**TASK, **given}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in TASK.items() if "STEP" not in name},  # the batch script itself
        {name: value for name, value in TASK.items() if name != "SLURM_PROCID"},
    ],
    ids=["no SLURM", "one task", "batch script", "salloc"],
)
def test_without_several_tasks_a_process_is_alone(environment):
    assert adopted(environment) == environment


def test_a_task_without_a_place_on_its_machine_is_refused():
    environment = {name: value for name, value in TASK.items() if name != "SLURM_LOCALID"}
    with pytest.raises(ValueError, match="set LOCAL_RANK"):
        adopt_slurm(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("gpu[007-009,12],login1", "gpu007"),
        ("gpu[12,7-9]", "gpu12"),
        ("a-b[01-02].cluster,c", "a-b01.cluster"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("x,y[1-2]", "x"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_a_list_without_a_host_is_refused():
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        first_host("")


@pytest.mark.parametrize(
    ("variables", "gpus", "own"),
    [
        ({}, 8, 0),
        ({"LOCAL_RANK": "3"}, 8, 3),
        # Started by srun, with RANK and WORLD_SIZE set by the batch script.
        ({"RANK": "11", "WORLD_SIZE": "16", "SLURM_LOCALID": "3"}, 8, 3),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}, 8, 1),
        ({"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 8, 2),  # torchrun within a task of srun
        ({"LOCAL_RANK": "3"}, 1, 0),  # a launcher that shows each process its own GPU alone
    ],
)
def test_each_process_takes_its_own_gpu(variables, gpus, own, monkeypatch):
    assert device_with(variables, gpus, monkeypatch) == torch.device("cuda", own)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "which of the 8 GPUs is this rank's? set LOCAL_RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "which of the 8 GPUs is this rank's? set LOCAL_RANK"),
        # Started by hand in a batch script, whose own number all of them have.
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "0"}, "which of the 8 GPUs"),
        ({"LOCAL_RANK": "8"}, "process 8 of this machine has no GPU of its own among 8"),
    ],
)
def test_a_process_without_a_gpu_of_its_own_is_refused(variables, words, monkeypatch):
    with pytest.raises(ValueError, match=re.escape(words)):
        device_with(variables, 8, monkeypatch)


def device_with(variables: dict[str, str], gpus: int, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device that a process takes on a machine with so many GPUs."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert own_device() == taken[0]
    return taken[0]


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        ({}, ""),
        ({**TASK, "SLURM_STEP_NUM_NODES": "2"}, "srun --nodes 2 --ntasks 8 "),
        ({**TASK, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, TORCHRUN_TWICE),
        ({"RANK": "1", "WORLD_SIZE": "3"}, "torchrun --nproc-per-node 3 -m "),
        (
            {"RANK": "1", "WORLD_SIZE": "3", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
            "torchrun --nproc-per-node 3 -m ",
        ),
    ],
    ids=["alone", "srun", "torchrun within srun", "by hand", "by hand in one task"],
)
def test_the_command_to_resume_starts_with_the_same_launcher(environment, command, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    adopt_slurm()
    assert launcher_command() == command
