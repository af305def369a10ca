"""Start the ranks of a benchmark as processes of their own, each on its own core as far as there are any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .machine import cores
from .workload import Workload

_STANDARD_ERROR = 2
# Long enough for a block of steps of a large network, which the other ranks may have to wait for.
_TIMEOUT = 1800.0


def run_ranks(names: Sequence[str], size: int, workload: Workload, rounds: int) -> dict[str, Any]:
    """What the first of `size` ranks reports of tasks, by their names."""
    with TemporaryDirectory(prefix="conadv-bench-") as folder:
        task, out = Path(folder, "task.json"), Path(folder, "out.json")
        facts = {"names": names, "workload": asdict(workload), "rounds": rounds, "cores": cores(), "timeout": _TIMEOUT}
        task.write_text(json.dumps(facts), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        program = ["-m", "conadv.study.bench.rank", str(task), str(out)]
        status = _wait_for([sys.executable, *launcher, *program])
        if status or not out.exists():
            raise ChildProcessError(f"a rank of the benchmark failed (status {status}): see above")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def _wait_for(command: list[str]) -> int:
    # Standard output belongs to the result of the whole benchmark.
    process = subprocess.Popen(command, env=_environment(), stdout=_STANDARD_ERROR)
    try:
        return process.wait()
    except BaseException:  # torchrun ends its ranks when it is asked to end, and leaves them behind when it is killed
        process.terminate()
        process.wait()
        raise


def _environment() -> dict[str, str]:
    """One thread a rank, no GPU, and the loopback, whatever the name of this machine resolves to."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **loopback}
