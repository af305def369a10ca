"""bfloat16 on the CPU is tried in a child process before a run uses it.

Some virtual machines report AMX, and its first instruction then ends the process with SIGILL. oneDNN leaves AMX out if
an environment variable says so, which it reads when its first operator runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

VARIABLE = "ONEDNN_MAX_CPU_ISA"
LIMIT = "AVX512_CORE_FP16"
"""The newest instructions below AMX."""

# AMX is used from 32 x 32 x 32 on.
_TRIAL = """
import torch
layers = [torch.nn.Conv2d(64, 64, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 64)]
with torch.autocast("cpu", torch.bfloat16):
    torch.nn.Sequential(*layers)(torch.ones(64, 64, 8, 8)).sum().backward()
"""
_WORKS, _WORKS_LIMITED, _FAILS = range(3)


def prepare(largest: Callable[[int], int] = int, tries: bool = True, sets: bool = True) -> str | None:
    """Make bfloat16 work on the CPU, and return a line to print if something had to be done.

    A limit that the user has set is kept, and nothing is tried.

    Args:
        largest: Returns the largest of one number per rank, so that all ranks do the same.
        tries: Whether this rank tries it: one on each machine.
        sets: Whether the limit may be set, because no operator of oneDNN has run in this process.

    Raises:
        ValueError: The limit is needed and may not be set, or does not help.
    """
    found = largest(_try() if tries and VARIABLE not in os.environ else _WORKS)
    if found == _WORKS:
        return None
    if found == _FAILS:
        raise ValueError("bfloat16 crashes on this processor, whatever its limit: use --precision float32")
    if VARIABLE not in os.environ and not sets:
        raise ValueError(f"bfloat16 crashes on this processor: set {VARIABLE}={LIMIT} before Python starts")
    os.environ.setdefault(VARIABLE, LIMIT)
    return f"bfloat16 crashes on this processor without a limit: {VARIABLE}={LIMIT} is set for this run"


def _try() -> int:
    if not _dies(os.environ):
        return _WORKS
    return _FAILS if _dies({**os.environ, VARIABLE: LIMIT}) else _WORKS_LIMITED


def _dies(environment: dict[str, str] | os._Environ[str]) -> bool:
    """Whether a product and a convolution end a process with a signal, forward or backward."""
    command = [sys.executable, "-c", _TRIAL]
    quiet = subprocess.DEVNULL
    # In a session of its own, so that Ctrl-C does not end it.
    child = subprocess.run(command, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)
    return child.returncode < 0
