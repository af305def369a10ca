"""Memory: how much is free, checked before it is allocated, and out of memory as the libraries below us report it."""

from __future__ import annotations

import os
from pathlib import Path

ADVICE = (
    "out of memory: lower --chunk-size, --width, --delay, --data.image-size, --data.workers or the "
    "number of ranks on this machine"
)

# Messages of PyTorch's allocators for the CPU and CUDA, for sizes that overflow, and for threads without a stack.
_SAID = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "can't start new thread")
_GIB = 2**30


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


def check_memory(size: int, what: str, advice: str) -> None:
    """Raise a ValueError if `size` bytes do not fit into free memory."""
    free = free_memory()
    if size > free:
        raise ValueError(f"{what}: needs {size / _GIB:.1f} GiB of memory, and {free / _GIB:.1f} are free; {advice}")
