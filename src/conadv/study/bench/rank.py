"""One rank of the layout benchmark: `torchrun ... -m conadv.study.bench.rank TASK.json OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from conadv.parallel.collectives import joined
from conadv.parallel.launch import own_rank

from .machine import pin
from .pieces import exchange
from .together import together
from .workload import Workload

_TASKS = {"together": together, "exchange": exchange}


def main(task_file: Path, out: Path) -> None:
    task = json.loads(task_file.read_text(encoding="utf-8"))
    workload, rounds, cores = Workload(**task["workload"]), task["rounds"], task["cores"]
    pin(cores[own_rank() % len(cores)])  # before the exchange starts its threads, which are part of a rank's work
    torch.set_num_threads(1)
    with joined(task["timeout"]) as world:
        found = {name: _TASKS[name](workload, rounds, world) for name in task["names"]}
        world.barrier()  # nobody leaves while another one still reads from it
    if world.is_main:
        out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
