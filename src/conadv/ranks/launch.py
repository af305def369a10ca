"""Rank, world size and address from the environment variables of torchrun or SLURM's srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", "0"))


def local_rank(missing: int = 0) -> int:
    """Return the number of this process on its machine, or `missing` if no launcher set it."""
    # Processes that a batch script starts without srun all have the script's own SLURM_LOCALID, 0.
    by_slurm = None if _in_batch_script(os.environ) else os.environ.get("SLURM_LOCALID")
    return int(os.environ.get("LOCAL_RANK") or by_slurm or missing)


def restarts() -> int:
    """Return how often torchrun has restarted the ranks of this machine."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def rank_0_keeps_store() -> bool:
    """Whether rank 0 hosts the store, which then ends with it; otherwise torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_command() -> str:
    """Return the launcher part of the command that starts as many ranks again; empty for a single process."""
    size = world_size()
    if size == 1:
        return ""
    in_step = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID") == os.environ.get("RANK")
    if in_step and not started_by_torchrun():
        return f"srun --nodes {os.environ.get('SLURM_STEP_NUM_NODES', '1')} --ntasks {size} "
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    nodes = f"--nnodes {size // local} " if size > local else ""
    return f"torchrun {nodes}--nproc-per-node {local} -m "


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's environment variables for a task of `srun` among several, if torchrun did not set them.

    Args:
        environment: The variables, changed in place.
    """
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    is_rank = "RANK" in environment or "WORLD_SIZE" in environment
    # A batch script is a single process, though SLURM_NTASKS is set.
    if is_rank or size == "1" or "SLURM_PROCID" not in environment or _in_batch_script(environment):
        return
    if "SLURM_LOCALID" not in environment:
        raise ValueError("srun set SLURM_PROCID but not SLURM_LOCALID: set LOCAL_RANK, or start with torchrun")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "127.0.0.1"
    # A port that is the same on all tasks of a step, and probably free.
    job, step = (re.sub(r"\D", "", environment.get(f"SLURM_{name}_ID", "")) or "0" for name in ("JOB", "STEP"))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(15_000 + (int(job) * 31 + int(step)) % 15_000),
    }
    environment.update({name: value for name, value in found.items() if name not in environment})


def first_host(nodes: str) -> str:
    """Return the first host in SLURM's list of nodes: gpu007 for "gpu[007-009,12],login1"."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", nodes.strip())
    if match is None:
        raise ValueError(f"no host in SLURM's list of nodes {nodes!r}: set MASTER_ADDR to the host of rank 0")
    prefix, numbers, suffix = match.groups()
    first = re.split("[-,]", numbers)[0] if numbers else ""
    # Brackets may follow brackets: rack[1-2]node[1-4].
    return prefix + first + (first_host(suffix) if suffix else "")


def _in_batch_script(environment: Mapping[str, str]) -> bool:
    """Whether this process runs in a SLURM job, but was not started by `srun`."""
    return "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
