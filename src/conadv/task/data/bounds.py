"""Limits on what is read from disk, and free memory, checked before memory is allocated."""

from __future__ import annotations

import os
from pathlib import Path

MAX_PIXELS = 89_478_485
"""Of one image: Pillow's own limit against decompression bombs, 270 MB decoded."""
MAX_BYTES = 2**28
"""Of one encoded image, or one file that is read whole."""
MAX_CLASSES = 100_000
"""More than any data set has; a label beyond it is a mistake, not a class."""

_GIB = 2**30


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
