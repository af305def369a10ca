"""This machine: its processor, the cores and the memory that we may use, and errors that mean that memory ran out."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

ADVICE = (
    "out of memory: lower --chunk-size, --width, --delay, --data.image-size, --data.train-size, --data.workers or the "
    "number of ranks on this machine"
)
# Messages of PyTorch's allocators for the CPU and CUDA, for sizes that overflow, and for threads without a stack.
_SAID = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "can't start new thread")


def processor() -> str:
    """The name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. PyTorch raises RuntimeError for it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)
    )


def free_memory() -> int:
    """Available memory in bytes, as reported by the system."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
