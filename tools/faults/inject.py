"""A rank of `conadv train` that brings a fault upon itself at an exact point of the program."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from faults.scenario import Fault
from support import ranks

PAUSE = 0.4  # seconds: shorter than any timeout


def main() -> None:
    """Be one rank in an interpreter of its own, as the JSON on its command line says."""
    words, settings, output, fault = json.loads(sys.argv[1])
    command(words, settings, output, fault and Fault(**{**fault, "victims": tuple(fault["victims"])}))


def command(words: list[str], settings: dict[str, str], output: str, fault: Fault | None) -> None:
    """Be one rank; the fault is None on all but its victims."""
    if fault is not None:
        _install(fault, Path(f"{output}.reached"))
    ranks._command(words, settings, output)


def _install(fault: Fault, mark: Path) -> None:
    """Let the fault happen at its point, and leave a mark."""
    action = _action(fault.kind)

    def act() -> None:
        mark.touch()
        action()

    if fault.point == "start":
        return act()
    if fault.point == "timer":
        timer = threading.Timer(fault.number / 100, act)
        timer.daemon = True
        return timer.start()
    passages = itertools.count(1)

    def reached() -> None:
        if next(passages) == fault.number:
            act()

    return _POINTS[fault.point](reached)


def _before(owner: Any, name: str, reached: Callable[[], None]) -> None:
    """Let every call of a function pass a point first."""
    function = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        reached()
        return function(*arguments, **options)

    setattr(owner, name, counted)


def _after_joining(reached: Callable[[], None]) -> None:
    join = dist.init_process_group

    def joined(*arguments: Any, **options: Any) -> None:
        join(*arguments, **options)
        reached()

    dist.init_process_group = joined


def _half_written(reached: Callable[[], None]) -> None:
    """The point is in the middle of a checkpoint."""
    whole = safetensors.torch.save_file

    def write(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        data = safetensors.torch.save(tensors, metadata)
        path.write_bytes(data[: len(data) // 2])
        reached()
        whole(tensors, path, metadata)

    safetensors.torch.save_file = write


def _each_pass(reached: Callable[[], None]) -> None:
    def hook(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Linear):
            reached()

    torch.nn.modules.module.register_module_forward_pre_hook(hook)


def _renames(reached: Callable[[], None]) -> None:
    _before(os, "rename", reached)
    _before(os, "replace", reached)


_POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "join": _after_joining,
    "broadcast": lambda reached: _before(dist, "broadcast", reached),
    "sum": lambda reached: _before(dist, "all_reduce", reached),
    "send": lambda reached: _before(dist, "isend", reached),
    "receive": lambda reached: _before(dist, "irecv", reached),
    "pass": _each_pass,
    "write": _half_written,
    "fsync": lambda reached: _before(os, "fsync", reached),
    "rename": _renames,
    "remove": lambda reached: _before(os, "unlink", reached),
}


def _action(kind: str) -> Callable[[], None]:
    match kind:
        case "SIGKILL" | "SIGTERM" | "SIGSTOP" | "pause":
            number = signal.SIGSTOP if kind == "pause" else signal.Signals[kind]
            return lambda: os.kill(os.getpid(), number)
        case "failing fsync" | "failing rename":
            return _fail
        case "full disk":
            return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        case "slow disk":
            return lambda: _before(os, "fsync", lambda: time.sleep(0.1))
        case "delayed message":
            return lambda: time.sleep(1.0)
        case "two processes":
            return lambda: time.sleep(4.0)
        case "lost messages":
            return lambda: time.sleep(3600)
        case "clock jump":
            return _jump
        case "reset":
            return _reset
    raise AssertionError(kind)


def _fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _jump() -> None:
    now = time.time
    time.time = lambda: now() + 1e6


def _reset() -> None:
    """Break all connections of this process, those to the store too."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not files
        try:
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.getpeername()  # an OSError where it only listens: no network breaks that
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


if __name__ == "__main__":
    main()
