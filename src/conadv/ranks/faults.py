"""If a rank crashes, hangs or raises an error, all ranks end, and one line names it.

raises    it prints the error with its rank, lane and role, and leaves a verdict in the store
crashes   its witness prints the signal (`last_words.py`), and connections to it break
hangs     waits of others end with the timeout

A rank whose wait for another one fails calls the roll in the store. A thread of each rank looks there every 5 seconds,
and answers. The first that knows which ranks did not answer, or kept the others waiting, leaves the verdict, and every
thread ends its process. torchrun ends the ranks of a failed run and prints which one failed first: so those that hang
are killed, and all others give it time to notice.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from conadv import last_words
from conadv.last_words import end_process, say_line
from conadv.machine import ADVICE, is_out_of_memory

from .launch import rank_0_keeps_store
from .layout import Layout
from .world import World, deadline

# Seconds between two looks into the store, for answers to the roll, and for torchrun to notice a rank that has failed.
BEAT, PATIENCE, NOTICE = 5.0, 8.0, 3.0
_GUARDS = count()  # several teams in one process group use different keys in its store


@contextmanager
def guarded(
    world: World,
    layout: Layout,
    agreed: tuple[type[BaseException], ...] = (),
    before_exit: Callable[[int], None] = lambda status: None,
    asked: Callable[[], bool] = lambda: False,
    raises: bool = False,
) -> Iterator[Callable[[int, str], None]]:
    """End all processes if any rank has an error within the context; one line names it, and no exit status is 0.

    It yields a function that ends all ranks immediately, from any thread, with an exit status and a message.

    Args:
        world: the ranks.
        layout: their roles, for messages.
        agreed: exceptions that all learning ranks raise in the same step; `main` prints them, and they are raised.
        before_exit: called with the exit status before the process ends immediately.
        asked: whether this process was asked to stop, as by torchrun when it has noticed that a rank has failed.
        raises: errors of this rank's own are raised with a note, not printed: they are in the code of the caller.
    """
    guard, who = _Guard(world, layout, before_exit, asked), layout.describe(world.rank)
    if world.size == 1:
        yield guard.end_all
        return
    last_words.rename(who)
    with guard.listening():
        try:
            yield guard.end_all
        except agreed as error:
            if world.is_main:
                stop = getattr(error, "exit_status", 0)  # of a request to stop, which is no error
                guard.publish(stop or 1, f"error: {error}", says=not stop)
            raise
        except Exception as error:
            if _is_of_peer(error):
                guard.call_roll(error)
            if raises:
                guard.publish(1, f"{who}: {type(error).__name__}: {error}", says=False)
                error.add_note(f"on {who}: the run ends on all {world.size} ranks")
                raise
            full = is_out_of_memory(error)
            expected = full or isinstance(error, ValueError | OSError | ArithmeticError)
            if not expected:
                traceback.print_exception(error)
            name = "" if expected else f"{type(error).__name__}: "
            guard.end_all(2 if isinstance(error, ValueError) else 1, f"error: {who}: {name}{ADVICE if full else error}")


def _is_of_peer(error: Exception) -> bool:
    """Whether an error says that another rank does not answer: Gloo's are known by their text only."""
    text = str(error).lower()
    words = ("gloo", "pair closure", "connection closed by peer", "connection reset by peer", "timed out waiting")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


class _Guard:
    """Ends this process after an error of any rank."""

    def __init__(
        self, world: World, layout: Layout, before_exit: Callable[[int], None], asked: Callable[[], bool]
    ) -> None:
        self._world, self._layout, self._before_exit, self._asked = world, layout, before_exit, asked
        store = dist.distributed_c10d._get_default_store() if world.size > 1 else dist.HashStore()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"conadv-faults-{next(_GUARDS)}", store)  # type: ignore[attr-defined]
        self._ends_itself = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="faults", daemon=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer the roll, and end this process after a verdict, within the context."""
        self._store.set(f"process/{self._world.rank}", f"{_machine()} {os.getpid()}")
        self._thread.start()
        try:
            yield
        finally:
            self._ends_itself.set()
            self._thread.join(NOTICE)

    def publish(self, status: int, text: str, says: bool = True) -> int:
        """Let all ranks end because of an error of this one, which ends by itself; the first one `says` why.

        Returns the exit status of all of them.
        """
        self._ends_itself.set()
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # where torchrun looks for the reason
            about = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
            with suppress(OSError):
                Path(path).write_text(json.dumps({"message": about}))
        return self._leave_verdict(text if says else "", status)

    def end_all(self, status: int, text: str) -> NoReturn:
        """End this process and all others; the first rank that calls it prints why."""
        self._end(self.publish(status, text))

    def call_roll(self, error: Exception) -> NoReturn:
        """Ask which ranks are there, since one of them does not answer; the thread ends this process."""
        keeper = self._layout.describe(0) if rank_0_keeps_store() else "the launcher, which hosts the store of the run,"
        text = f"error: {keeper} stopped answering: the run ends on all {self._world.size} ranks"
        with deadline(3 * PATIENCE, text, self._before_exit):
            with suppress(RuntimeError):  # the store is gone
                self._store.set(f"waiting/{self._world.rank}", "")
                self._store.set("roll", str(error))
            while True:
                time.sleep(BEAT)

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the store is gone, which the next communication will notice, too
            while not self._store.check(["roll"]):
                if self._ends_itself.wait(BEAT):
                    return
            self._store.set(f"here/{self._world.rank}", "")
            end = time.monotonic() + PATIENCE
            while not self._store.check(["verdict"]) and time.monotonic() < end:
                if self._asked():
                    self._end(128 + signal.SIGTERM)
                if self._ends_itself.wait(min(0.5, BEAT)):
                    return
            if not self._store.check(["verdict"]):
                self._judge(self._store.get("roll").decode())
            _, status, *guilty = json.loads(self._store.get("verdict"))
            for rank in guilty:
                self._kill_here(rank)
            if not self._ends_itself.wait(NOTICE):
                self._end(status)

    def _judge(self, error: str) -> None:
        """Name the ranks that did not answer or, if all did, those that kept the others waiting."""
        late = "timed out" in error.lower() or "timeout" in error.lower()
        guilty = self._without("here") or (self._without("waiting") if late else [])
        text = f"{', '.join(map(self._layout.describe, guilty))} stopped answering"
        if not guilty:
            text = f"a connection broke, though all ranks are alive ({error})"
        advice = f" (raise the timeout if a step may take longer than {self._world.timeout:g} seconds)" * late
        self._leave_verdict(f"error: {text}: the run ends on all {self._world.size} ranks{advice}", 1, guilty)

    def _without(self, name: str) -> list[int]:
        """The ranks that have not set a key."""
        return [rank for rank in range(self._world.size) if not self._store.check([f"{name}/{rank}"])]

    def _leave_verdict(self, text: str, status: int, guilty: Sequence[int] = ()) -> int:
        """Let the threads of all ranks end their processes, as the first verdict says; its rank prints the text."""
        kept = own = json.dumps([self._world.rank, status, *guilty])
        with suppress(RuntimeError):  # without a store no rank can tell which was the first
            kept = self._store.compare_set("verdict", "", own).decode()
            self._store.set("roll", "")
        if text and kept == own:
            say_line(text)
        return int(json.loads(kept)[1])

    def _kill_here(self, rank: int) -> None:
        """Kill a rank that hangs if it is on this machine: its launcher waits for its end."""
        key = f"process/{rank}"
        machine, process = self._store.get(key).decode().rsplit(" ", 1) if self._store.check([key]) else ("", "")
        if machine == _machine():
            with suppress(OSError):
                os.kill(int(process), signal.SIGKILL)

    def _end(self, status: int) -> NoReturn:
        self._before_exit(status)
        if self._world.rank == 0 and self._world.size > 1 and rank_0_keeps_store():
            time.sleep(BEAT + 1)  # the others need the store to read the verdict
        end_process(status)


def _machine() -> str:
    """This machine, or this container of it: process ids are those of a namespace."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - it is no path
