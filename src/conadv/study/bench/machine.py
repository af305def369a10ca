"""The machine: one thread on one core for the time of a measurement, and what a reader must know of it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from conadv.train.folder import versions


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(core: int) -> None:
    """Keep to one core, where the system lets a process choose; threads that are started later keep to it too."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {core})


@contextmanager
def one_core() -> Iterator[None]:
    """Within, this process works with one thread on its last core; the first one also serves most interrupts."""
    threads, before = torch.get_num_threads(), cores()
    torch.set_num_threads(1)
    pin(before[-1])
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if sys.platform == "linux":
            os.sched_setaffinity(0, before)


def describe() -> dict[str, Any]:
    """What a figure depends on beside our code; the load says whether the machine was ours alone."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": len(cores()),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
        **versions(),
    }


def _processor() -> str:
    """The name that the processor gives itself."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
