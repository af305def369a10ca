"""Ranks of `conadv train`, forked from one process that has imported PyTorch, so that a rank starts in milliseconds.

soak.py ──► socket ──► server: one thread, everything imported ──► fork ──► a rank, in its own process group
        ◄── process numbers and exit statuses ◄──

A rank is a real process with real files, signals and connections; only the imports and the parsing of flags that an
earlier rank had too are done once. `python -m faults.forks` is the server, with its socket as standard input.
"""

from __future__ import annotations

import codecs
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from faults.scenario import Fault

ROOT = Path(__file__).parents[2]
FOLDER = "THE-RUN"  # stands for the folder of a run in flags, so that they are parsed once for all runs
_LONGEST = 2**16


class Forked:
    """A process of the server, with the interface of `multiprocessing.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None
        self._ended = threading.Event()

    def end(self, status: int) -> None:
        self.exitcode = status
        self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def kill(self) -> None:
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        pass


class Server:
    """The process that ranks are forked from, started when this is made; threads may share it."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "tools"), str(ROOT / "tests"))))
        settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with other:
            self._process = subprocess.Popen([sys.executable, "-m", "faults.forks"], stdin=other, env=settings)
        self._children: dict[int, Forked] = {}
        self._started: list[Forked] = []
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def start(
        self, words: Sequence[str], folder: Path, settings: dict[str, str], output: Path, fault: Fault | None
    ) -> Forked:
        """One rank: its words, in which `FOLDER` stands for its folder, its environment and its output."""
        asked = {"words": list(words), "folder": str(folder), "settings": settings, "output": str(output)}
        with self._asking, self._changed:
            self._socket.send(json.dumps({**asked, "fault": asdict(fault) if fault else None}).encode())
            if not self._changed.wait_for(lambda: self._started, 300):
                raise RuntimeError("the fork server does not answer")
            return self._started.pop()

    def close(self) -> None:
        """End the server, which ends all of its ranks."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._socket.close()
        self._process.wait()

    def _listen(self) -> None:
        while data := self._socket.recv(_LONGEST):
            pid, status = json.loads(data)
            with self._changed:
                if status is None:
                    self._children[pid] = Forked(pid)
                    self._started.append(self._children[pid])
                    self._changed.notify_all()
                else:
                    self._children.pop(pid).end(status)


def serve() -> None:
    """Fork ranks until the other end of the socket is closed."""
    with socket.socket(fileno=os.dup(0)) as asks:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        _import_everything()
        gc.freeze()  # a collection in a child would copy all of it
        assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"  # noqa: PTH208
        living: set[int] = set()
        while True:
            ready, _, _ = select.select([asks, woken], [], [])
            if woken in ready:
                os.read(woken, 1000)
                for pid, status in _ended():
                    living.discard(pid)
                    asks.send(json.dumps([pid, status]).encode())
            if asks in ready:
                data = asks.recv(_LONGEST)
                if not data:
                    break
                living.add(pid := _fork(json.loads(data)))
                asks.send(json.dumps([pid, None]).encode())
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _import_everything() -> None:
    """What a rank would import on its way."""
    for name in ("conadv.trainer.train", "conadv.optim.lars", "torch._dynamo", "numpy.random", "support.tiny"):
        import_module(name)  # torch._dynamo: PyTorch loads it when the first optimizer is made
    import_module("faults.inject")
    codecs.lookup("utf-8-sig")


def _ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


_parsed: dict[tuple[str, ...], tuple[Any, Any]] = {}


def _fork(asked: dict[str, Any]) -> int:
    parsed = _parse(tuple(asked["words"]), Path(asked["folder"]))
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(3, 1000)
        from conadv import cli
        from faults import inject

        if parsed is not None:
            cli.parse = lambda words: parsed  # type: ignore[assignment]
        words = [asked["folder"] if word == FOLDER else word for word in asked["words"]]
        fault = asked["fault"] and Fault(**{**asked["fault"], "victims": tuple(asked["fault"]["victims"])})
        inject.command(words, asked["settings"], asked["output"], fault)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _parse(words: tuple[str, ...], folder: Path) -> Any:
    """What `cli.parse` returns for these words, which are parsed once; None: they are refused."""
    from conadv import cli

    if words not in _parsed:
        try:
            _parsed[words] = cli.parse(words)
        except Exception:  # the rank itself will say so
            return None
    command, bound = _parsed[words]
    kwargs = {name: folder if value == Path(FOLDER) else value for name, value in bound.kwargs.items()}
    return command, SimpleNamespace(args=bound.args, kwargs=kwargs)


if __name__ == "__main__":
    serve()
