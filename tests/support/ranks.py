"""Rank processes for tests, forked from one server that has imported PyTorch, which is what takes seconds.

A `Pool` of them takes one task after the other; a `Run` has fresh ones, which may be killed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conadv import cli
from conadv.last_words import explained_status
from conadv.ranks import faults
from conadv.ranks.world import World
from conadv.trainer import build, checkpoint
from support import covering, teams
from support.waiting import has_taken, until

# mutants.py forks them from the process that runs the tests, which has imported the mutant.
_CONTEXT: Any = multiprocessing.get_context(os.environ.get("CONADV_RANKS", "forkserver"))
# PyTorch loads the last of these when the first optimizer is made.
_PRELOAD = ["support.ranks", "support.tasks", "conadv.trainer.train", "torch._dynamo", "numpy.random"]
_CONTEXT.set_forkserver_preload(_PRELOAD)


@cache
def _start_server() -> None:
    """Until the server has imported everything, which takes minutes on a busy machine and is no time of any test."""
    process = _CONTEXT.Process(target=int)
    process.start()
    process.join()
    process.close()


class Pool:
    """Processes that are ranks of one world after the other.

    Args:
        size: of the largest world.
        preload: further modules that they have imported from the start, if the server is not running yet.
    """

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        _CONTEXT.set_forkserver_preload([*preload, *_PRELOAD])
        _start_server()
        self._ends: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._task = 0
        for _ in range(size):
            end, other = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(other,), daemon=True)
            process.start()
            other.close()
            self._ends.append(end)
            self._processes.append(process)

    def run(self, size: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `task(*arguments)` returns on each of `size` ranks."""
        with store() as port:
            return self._run(task, arguments, [environment(rank, size, port) for rank in range(size)])

    def run_twice(self, size: int, task: Callable[..., Any], *arguments: Any) -> list[list[Any]]:
        """What `task(*arguments)` returns before and after a restart that the agent of rank 0 did not count."""
        with store() as port:
            attempts = [[environment(rank, size, port, n if rank else 0) for rank in range(size)] for n in (0, 1)]
            return [self._run(task, arguments, environments) for environments in attempts]

    def _run(self, task: Callable[..., Any], arguments: Sequence[Any], environments: list[dict[str, str]]) -> list[Any]:
        self._task += 1
        for end, settings in zip(self._ends, environments, strict=False):
            end.send((self._task, task, arguments, settings))
        results = self._results(len(environments), 100)
        failures = [text for fine, text in results.values() if not fine]
        assert not failures, "\n".join(failures)
        return [results[rank][1] for rank in range(len(environments))]

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            with suppress(BrokenPipeError):
                end.send(None)
            process.join(10)
            process.kill()
            process.join()
            process.close()
            end.close()

    def _results(self, size: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        """What each rank answers; after a failure the others, which may wait for it, are given little time."""
        results: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + timeout
        while missing := [rank for rank in range(size) if rank not in results]:
            ready = wait([self._ends[rank] for rank in missing], max(0.0, end - time.monotonic()))
            if not ready and all(fine for fine, _ in results.values()):
                raise TimeoutError(f"ranks {missing} did not finish their task in {timeout} seconds")
            if not ready:
                break
            for rank in missing:
                if self._ends[rank] in ready:
                    try:
                        number, fine, value = self._ends[rank].recv()
                    except EOFError:
                        self._processes[rank].join()
                        status = self._processes[rank].exitcode or 0
                        raise ChildProcessError(f"rank {rank} {explained_status(status)}") from None
                    if number == self._task:  # else it is of an earlier task that failed
                        results[rank] = fine, value
                        end = end if fine else min(end, time.monotonic() + 10)
        return results


class store:  # noqa: N801 - a context manager
    """A store as torchrun keeps one for its ranks; its port."""

    def __enter__(self) -> int:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def __exit__(self, *_: object) -> None:
        self._store = None


def environment(rank: int, size: int, port: int, restart: int = 0) -> dict[str, str]:
    """What torchrun tells a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {
        **{name: str(value) for name, value in names.items()},
        "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", ""),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }


class Run:
    """`conadv train` on fresh processes, each a rank, which may be killed; what they say goes to one file."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        size: int,
        output: Path | None = None,
        odd: Sequence[str] = (),
        **settings: str,
    ) -> None:
        """`odd`: what the last rank is started with instead of `words`."""
        _start_server()
        self.folder = folder
        self._output = output or folder.with_suffix(".txt")
        self.store = store()
        port = self.store.__enter__()
        self.processes = []
        for rank in range(size):
            own = odd if odd and rank == size - 1 else words
            arguments = (["train", *own], {**environment(rank, size, port), **settings}, str(self._output))
            process = _CONTEXT.Process(target=_command, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def wait_for_step(self, step: int, timeout: float = 60) -> None:
        """Until the run has taken this many steps."""
        until(
            lambda: has_taken(self.folder, step),
            lambda: f"the run did not come to step {step}: {self.said()}",
            timeout,
            lambda: any(process.is_alive() for process in self.processes),
        )

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal_number)

    def statuses(self, *ranks: int, timeout: float = 60) -> list[int | None]:
        """How these ranks (all by default) ended; a signal is a negative number, None has not ended."""
        processes = [self.processes[rank] for rank in ranks or range(len(self.processes))]
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in processes]

    def said(self) -> str:
        text = self._output.read_text() if self._output.exists() else ""
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))  # a greeting of PyTorch 2.8

    def complaints(self) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith("error:")]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self.store.__exit__()


def _serve(end: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else each of the collections below walks, and copies, everything that the server has imported
    while (task := end.recv()) is not None:
        number, function, arguments, settings = task
        os.environ.update(settings)
        try:
            with covering.recording():
                result = function(*arguments)
            end.send((number, True, result))
        except BaseException:
            end.send((number, False, f"rank {settings['RANK']}: {traceback.format_exc()}"))
        gc.collect()  # models in cycles keep their process groups, whose threads spin


def _command(words: list[str], settings: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(settings)
    torch.set_num_threads(1)
    gc.freeze()
    faults.BEAT, faults.PATIENCE, faults.NOTICE = 0.3, 2.0, 0.5  # enough on one machine
    if "SLOW_SAVE" in settings:
        write = checkpoint.write_checkpoint
        checkpoint.write_checkpoint = lambda *arguments: (time.sleep(float(settings["SLOW_SAVE"])), write(*arguments))
    if settings.get("SLOW_LEAVE") == settings["RANK"]:
        barrier = World.barrier
        World.barrier = lambda world: (barrier(world), time.sleep(3))
    if "ENDLESS_LISTING" in settings:
        build.open_data = lambda *_, **__: _list_endlessly()
    if settings.get("STOP_RANK") == settings["RANK"]:
        kept = dist.TCPStore("127.0.0.1", int(settings["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        os.kill(os.getpid(), signal.SIGSTOP)
        del kept
    if words[1] == "team":
        teams.train_endlessly(words[2])
    with covering.recording():
        status = cli.main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _list_endlessly() -> bytes:
    print("listing", flush=True)
    time.sleep(600)
    return b""
