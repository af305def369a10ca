"""Ranks of a benchmark: one process each, on a GPU or core of its own if there are enough.

torchrun ... -m conadv.study.bench.ranks TASK.json OUT.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from conadv.machine import usable_cores
from conadv.parallel.collectives import joined
from conadv.parallel.launch import own_rank

from .workload import Workload

_STANDARD_ERROR = 2
# Long enough for a block of steps of a large network, which the other ranks may have to wait for.
_TIMEOUT = 1800.0


def places() -> int:
    """The number of GPUs, or of usable cores if there is no GPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else len(usable_cores())


@contextmanager
def one_core() -> Iterator[None]:
    """Run with one thread on the last core, because the first one serves most interrupts."""
    threads, before = torch.get_num_threads(), usable_cores()
    torch.set_num_threads(1)
    _keep_to(before[-1:])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _keep_to(before)


def run_ranks(tasks: Sequence[str], size: int, workload: Workload, rounds: int) -> list[Any]:
    """Run functions, given as module:name, on `size` ranks, and return their results from rank 0.

    Each is called with the workload, the number of rounds and the world.
    """
    with TemporaryDirectory(prefix="conadv-bench-") as folder:
        task, out = Path(folder, "task.json"), Path(folder, "out.json")
        task.write_text(json.dumps({"tasks": tasks, "workload": asdict(workload), "rounds": rounds}), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        status = _wait_for([sys.executable, *launcher, "-m", "conadv.study.bench.ranks", str(task), str(out)])
        if status or not out.exists():
            raise ChildProcessError(f"a rank of the benchmark failed (status {status}): see above")
        found: list[Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def main(task_file: Path, out: Path) -> None:
    """What each rank runs."""
    task = json.loads(task_file.read_text(encoding="utf-8"))
    if not torch.cuda.is_available():
        cores = usable_cores()
        _keep_to([cores[own_rank() % len(cores)]])  # before the exchange starts its threads, which are a rank's work
    torch.set_num_threads(1)
    found = []
    with joined(_TIMEOUT) as world:
        for target in task["tasks"]:
            module, _, name = target.partition(":")
            found.append(getattr(import_module(module), name)(Workload(**task["workload"]), task["rounds"], world))
        world.barrier()  # no rank leaves while another still reads from it
    if world.is_main:
        out.write_text(json.dumps(found), encoding="utf-8")


def _keep_to(cores: Sequence[int]) -> None:
    """Pin this process, and threads that it starts later, to these cores (Linux only)."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)


def _wait_for(command: list[str]) -> int:
    # One thread per rank, and the loopback, whatever the name of this machine resolves to.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    path = os.pathsep.join(path for path in sys.path if path)  # a task may be in a script's folder
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **loopback}
    # Standard output belongs to the result of the whole benchmark.
    process = subprocess.Popen(command, env=environment, stdout=_STANDARD_ERROR)
    try:
        return process.wait()
    except BaseException:  # torchrun ends its ranks when it is terminated, and leaves them behind when it is killed
        process.terminate()
        process.wait()
        raise


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
