"""Wait for something, and fail with words when it does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(
    condition: Callable[[], object],
    otherwise: Callable[[], str] = lambda: "nothing happened",
    seconds: float = 120,
    alive: Callable[[], bool] = lambda: True,
    every: float = 0.02,
) -> None:
    """Return as soon as the condition holds; fail after some seconds, or once what should bring it about has ended."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and alive(), otherwise()
        time.sleep(every)


def has_taken(folder: Path, step: int) -> bool:
    """Whether the run in a folder has taken so many steps."""
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_bytes().splitlines()) >= step
