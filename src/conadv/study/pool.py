"""A pool of processes, each pinned to its own cores, which end when their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conadv.machine import usable_cores

_POLL_SECONDS = 0.1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    key: Any
    status: int
    """Exit status; negative: the signal that killed it."""
    seconds: float


@dataclass(frozen=True)
class _Running:
    key: Any
    process: subprocess.Popen[bytes]
    slot: int
    began: float


class Pool:
    """At most `size` processes at a time, each pinned to `threads` cores, which they share if there are too few."""

    def __init__(self, size: int, threads: int, nice: int) -> None:
        cores = usable_cores()
        self._slots = [_share(cores, slot, threads) for slot in range(size)]
        self._free = list(range(size))
        self._nice = nice
        self._running: list[_Running] = []

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def running(self) -> list[tuple[Any, float]]:
        """The keys of the running processes, and their seconds so far."""
        return [(one.key, time.monotonic() - one.began) for one in self._running]

    def start(self, key: Any, command: Sequence[str], log: Path, keep_open: int, threads: int) -> None:
        """Start a command with its output in a file. It inherits the file descriptor `keep_open`."""
        slot = self._free.pop(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(keep_open,),
                process_group=0,  # Ctrl-C reaches only the parent, which passes it on
                preexec_fn=_in_child(self._slots[slot], self._nice, os.getpid()),
            )
        self._running.append(_Running(key, process, slot, time.monotonic()))

    def wait(self) -> Iterator[Ended]:
        """Yield the processes that have ended; if none has, sleep a moment and yield nothing."""
        if all(one.process.poll() is None for one in self._running):
            time.sleep(_POLL_SECONDS)
        for one in list(self._running):
            status = one.process.poll()
            if status is not None:
                self._running.remove(one)
                self._free.append(one.slot)
                yield Ended(one.key, status, time.monotonic() - one.began)

    def stop(self) -> None:
        """Send SIGTERM to all processes and wait for them."""
        for one in self._running:
            one.process.send_signal(signal.SIGTERM)
        for one in self._running:
            one.process.wait()


def _share(cores: Sequence[int], slot: int, threads: int) -> set[int]:
    return {cores[(slot * threads + number) % len(cores)] for number in range(threads)}


def _in_child(cores: set[int], nice: int, parent: int) -> Callable[[], None]:
    """The function that a child calls before it executes its command."""
    library = ctypes.CDLL(None)

    def prepare() -> None:
        os.nice(nice)
        if sys.platform == "linux":
            os.sched_setaffinity(0, cores)
            # Otherwise a run of a killed sweep would keep writing to a folder that the next sweep resumes.
            library.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare
