"""How this process was started: by torchrun, by hand with the same variables, by SLURM's srun, or alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


def world_size() -> int:
    """How many ranks were started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The number of this process among those of its machine; also where only RANK and WORLD_SIZE were set by hand."""
    return int(_told_local_rank(os.environ) or 0)


def has_local_rank() -> bool:
    """Whether a launcher told this process its number."""
    return bool(_told_local_rank(os.environ))


def _told_local_rank(environment: Mapping[str, str]) -> str | None:
    # What a batch script starts has the script's own number, which is 0 for all.
    by_slurm = None if _in_batch_script(environment) else environment.get("SLURM_LOCALID")
    return environment.get("LOCAL_RANK") or by_slurm


def _in_batch_script(environment: Mapping[str, str]) -> bool:
    """Whether this is no task of `srun`: only these belong to a step."""
    return "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment


def restarts() -> int:
    """How often torchrun's agent on this machine has started its ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def rank_0_keeps_store() -> bool:
    """Whether the store of the run ends with rank 0; else torchrun keeps it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_command() -> str:
    """What to write before `conadv` to start as many ranks in the same way; empty for a single process."""
    size = world_size()
    if size == 1:
        return ""
    in_step = "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_PROCID") == os.environ.get("RANK")
    if in_step and not started_by_torchrun():
        nodes = os.environ.get("SLURM_STEP_NUM_NODES", "1")
        return f"srun --nodes {nodes} --ntasks {size} "
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    nodes = f"--nnodes {size // local} " if size > local else ""
    return f"torchrun {nodes}--nproc-per-node {local} -m "


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torchrun would set from those of `srun`, where none of torchrun's are set.

    Args:
        environment: The variables, changed in place.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return
    found = slurm_variables(environment)
    environment.update({name: value for name, value in found.items() if name not in environment})


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables as a task of `srun` has them; empty where `srun` did not start several tasks."""
    size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    # A batch script itself is one process, though its job has SLURM_NTASKS.
    if size == "1" or "SLURM_PROCID" not in environment or _in_batch_script(environment):
        return {}
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "127.0.0.1"
    local = environment.get("SLURM_LOCALID")
    if local is None:
        raise ValueError("srun set SLURM_PROCID but not SLURM_LOCALID: set LOCAL_RANK, or start with torchrun")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_port(environment)),
    }


def first_host(nodes: str) -> str:
    """The first host of SLURM's list of nodes, such as "gpu[007-009,12],login1" (gpu007)."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]+)\])?([^,]*)", nodes.strip())
    if match is None:
        raise ValueError(f"no host in SLURM's list of nodes {nodes!r}: set MASTER_ADDR to the host of rank 0")
    prefix, numbers, suffix = match.groups()
    first = re.split("[-,]", numbers)[0] if numbers else ""
    # Brackets may follow brackets: rack[1-2]node[1-4].
    return prefix + first + (first_host(suffix) if suffix else "")


def _port(environment: Mapping[str, str]) -> int:
    """The same on all tasks of a step, and likely another one for other steps of the same machine."""
    digits = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    step = re.sub(r"\D", "", environment.get("SLURM_STEP_ID", "")) or "0"
    return 15_000 + (int(digits) * 31 + int(step)) % 15_000
