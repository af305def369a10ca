"""A pool of processes, each pinned to its own cores. They are killed when their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conadv.machine import usable_cores

_POLL_SECONDS = 0.1
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


@dataclass(frozen=True)
class Job:
    """A process of the pool."""

    key: Any
    process: subprocess.Popen[bytes]
    slot: int
    began: float

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    @property
    def status(self) -> int | None:
        """Exit status; negative: the signal that killed it; None: it is running."""
        return self.process.poll()


class Pool:
    """At most `size` processes at a time, each pinned to `threads` cores; with too few cores, they share them."""

    def __init__(self, size: int, threads: int, nice: int) -> None:
        cores = usable_cores()
        self._slots = [
            {cores[(slot * threads + number) % len(cores)] for number in range(threads)} for slot in range(size)
        ]
        self._free = list(range(size))
        self._nice = nice
        self.running: list[Job] = []

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def start(self, key: Any, command: Sequence[str], log: Path, keep_open: int, threads: int) -> None:
        """Start a command with its output in a file. It inherits the file descriptor `keep_open`."""
        slot = self._free.pop(0)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        log.unlink(missing_ok=True)  # what a link points to would be written over
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
        self.running.append(Job(key, process, slot, time.monotonic()))

    def wait(self) -> list[Job]:
        """Remove and return the processes that have ended; if none has, sleep a moment."""
        ended = [job for job in self.running if job.status is not None]
        self.running = [job for job in self.running if job not in ended]
        self._free += [job.slot for job in ended]
        if not ended:
            time.sleep(_POLL_SECONDS)
        return ended

    def stop(self) -> None:
        """Send SIGTERM to all processes and wait for them."""
        for job in self.running:
            job.process.send_signal(signal.SIGTERM)
        for job in self.running:
            job.process.wait()


def _in_child(cores: set[int], nice: int, parent: int) -> Callable[[], None]:
    """The function that a child process calls before it runs its command."""
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
