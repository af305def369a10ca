"""Rank and world size from the environment variables of torchrun, which other launchers can set, too."""

from __future__ import annotations

import os


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "WORLD_SIZE" not in os.environ and tasks != "1":
        raise ValueError(
            f"srun started {tasks} processes that do not know their rank: set RANK, LOCAL_RANK and WORLD_SIZE as "
            "examples/slurm.sbatch does, or WORLD_SIZE=1 for runs of their own"
        )
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", "0"))


def local_rank(missing: int = 0) -> int:
    """Return the number of this process on its machine, or `missing` if no launcher set it."""
    return int(os.environ.get("LOCAL_RANK") or missing)


def restarts() -> int:
    """Return how often torchrun has restarted the ranks of this machine."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def rank_0_keeps_store() -> bool:
    """Whether rank 0 hosts the store, which then ends with it; otherwise torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def launcher_command() -> str:
    """Return the launcher part of the command that starts as many ranks again; empty for a single process."""
    size = world_size()
    if size == 1:
        return ""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    nodes = f"--nnodes {size // local} " if size > local else ""
    return f"torchrun {nodes}--nproc-per-node {local} -m "
