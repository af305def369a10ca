"""This machine: its processor, cores, threads and memory, and errors that mean that memory ran out."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

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


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result]:
    """Map a function over items with `workers` threads, each of them at most two results in advance.

    An error in a worker is raised when its result is due. No worker is left running, however this ends.
    """
    if workers == 0:
        yield from map(function, items)
        return
    items = iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="conadv-data")
    waiting: deque[Future[Result]] = deque()
    try:
        waiting.extend(pool.submit(function, item) for item in islice(items, 2 * workers))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(items, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
