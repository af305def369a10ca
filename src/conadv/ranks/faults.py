"""If a rank crashes, hangs or raises an error, all ranks end, and one line names it.

raises    it prints the error with its rank, lane and role, and leaves a verdict in the store
crashes   its witness prints the signal (`last_words.py`); a rank whose connection to it breaks calls the roll
hangs     waits of others end with the timeout, and they call the roll

A thread of each rank looks into the store every 5 seconds. After a verdict it ends the process; when the roll is
called it answers. The ranks that do not answer are named, or else those that keep the others waiting. torchrun ends the
ranks of a failed run and prints which one failed first; so a rank that is innocent gives it time to notice the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from conadv import last_words
from conadv.last_words import end_process, say_line
from conadv.machine import ADVICE, is_out_of_memory

from .launch import rank_0_keeps_store, started_by_torchrun
from .layout import Layout
from .world import World, deadline

# Seconds between two looks into the store, and those that answers to the roll are waited for.
BEAT, PATIENCE = 5.0, 8.0
# Seconds in which the store answers, or torchrun notices a rank that has failed.
_ANSWER = 3.0
_GUARDS = count()  # several teams in one process group use different keys in its store


@contextmanager
def guarded(
    world: World,
    layout: Layout,
    agreed: tuple[type[BaseException], ...] = (),
    before_exit: Callable[[int], None] = lambda status: None,
    asked: Callable[[], bool] = lambda: False,
    hint: str = "raise --timeout",
    raises: bool = False,
) -> Iterator[Callable[[int, str], None]]:
    """End all processes if any rank has an error within the context; one line names it, and no exit status is 0.

    It yields a function that ends all ranks immediately, from any thread, with an exit status and a message.

    Args:
        world: the ranks.
        layout: their roles, for messages.
        agreed: exceptions that all learning ranks raise in the same step; they are raised as usual.
        before_exit: called with the exit status before the process ends immediately.
        asked: whether this process was asked to stop, as by torchrun when it has noticed that a rank has failed.
        hint: the advice if a step takes longer than the timeout.
        raises: errors of this rank's own are raised with a note, not printed: they are in the code of the caller.
    """
    guard, who = _Guard(world, layout, before_exit, asked, hint), layout.describe(world.rank)
    if world.size == 1:
        yield guard.end_all
        return
    last_words.rename(who)
    with guard.listening():
        try:
            yield guard.end_all
        except agreed as error:
            # Only by the rank that prints it: after another one's verdict it would be ended before that.
            if getattr(error, "speaks", world.rank == 0):
                status = getattr(error, "exit_status", 2 if isinstance(error, ValueError) else 1)  # a stop has its own
                guard.publish(status, str(error))
            raise
        except Exception as error:
            if _is_of_peer(error):
                guard.leave_after_peer(error)
            if raises:
                guard.publish(1, f"{who}: {type(error).__name__}: {error}")
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
        self, world: World, layout: Layout, before_exit: Callable[[int], None], asked: Callable[[], bool], hint: str
    ) -> None:
        self._world, self._layout, self._before_exit, self._asked, self._hint = world, layout, before_exit, asked, hint
        self._store: Any = None
        if world.size > 1:
            kept = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"conadv-faults-{next(_GUARDS)}", kept)  # type: ignore[attr-defined]
        self._ending = threading.Lock()  # held by the thread that ends the process

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer the roll, and end this process after a verdict, within the context."""
        self._store.set(f"process/{self._world.rank}", f"{_machine()} {os.getpid()}")
        over = threading.Event()
        thread = threading.Thread(target=self._listen, args=(over,), name="faults", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_ANSWER)

    def publish(self, status: int, text: str, tells_torchrun: bool = True) -> bool:
        """Leave a verdict in the store, and in the file where torchrun looks for the reason; True for the first rank.

        From now on this rank ends by itself.
        """
        self._ending.acquire()
        if self._world.size == 1:
            return True
        with suppress(RuntimeError):
            if self._store.add("claims", 1) > 1:
                return False
            self._store.set("verdict", str(status))
            self._store.set("roll", "")
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and tells_torchrun:
            about = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
            with suppress(OSError):
                Path(path).write_text(json.dumps({"message": about}))
        return True

    def end_all(self, status: int, text: str) -> NoReturn:
        """End this process and all others; the first rank that calls it prints why."""
        if self.publish(status, text):
            say_line(text)
        self._end(status)

    def leave_after_peer(self, error: Exception) -> NoReturn:
        """End this process because another rank does not answer; the first rank to find out which one says so."""
        with suppress(ValueError):  # outside the main thread; torchrun ends this process once it has noticed
            signal.signal(signal.SIGTERM, lambda *_: None if self._ending.locked() else end_process(143))
        keeper = "the launcher, which hosts the store of the run,"
        keeper = self._layout.describe(0) if rank_0_keeps_store() else keeper
        text = f"error: {keeper} stopped answering: the run ends on all {self._world.size} ranks"
        with deadline(PATIENCE + 3 * _ANSWER, text, self._before_exit), suppress(RuntimeError):
            self._call_roll(error)
        say_line(text)
        self._end(1)

    def _call_roll(self, error: Exception) -> NoReturn:
        """Find out which ranks do not answer, or else keep others waiting; end them, if here, and this process."""
        store, others = self._store, [rank for rank in range(self._world.size) if rank != self._world.rank]
        store.set(f"failing/{self._world.rank}", "")
        store.set("roll", "")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not store.check([f"failing/{rank}" for rank in others]):
            if self._asked():
                self._end(128 + signal.SIGTERM)
            if store.check(["verdict"]):
                break
            time.sleep(min(0.5, BEAT))
        busy = [rank for rank in others if not store.check([f"failing/{rank}"])]
        lost = [rank for rank in busy if not store.check([f"here/{rank}"])]
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        guilty = lost or (busy if late else [])
        text = self._judge(lost, guilty, error)
        hung = self._processes_here(guilty)
        if not self.publish(1, text, tells_torchrun=not hung):
            self._end_innocent()
        for process in hung:  # torchrun should name them as the cause, not the first rank to notice
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.5 * bool(hung))  # the witness of that rank prints first
        say_line(f"error: {text}")
        self._end(1)

    def _judge(self, lost: list[int], guilty: list[int], error: Exception) -> str:
        names = ", ".join(map(self._layout.describe, guilty))
        if lost:
            return f"{names} stopped answering: the run ends on all {self._world.size} ranks"
        if guilty:
            waited = f"{self._world.timeout:g} seconds"
            return f"{names} kept the others waiting for {waited}: {self._hint} if a step may take longer"
        who, reason = self._layout.describe(self._world.rank), " ".join(str(error).split())
        return f"{who} lost a connection, though all ranks are alive: {reason}"

    def _processes_here(self, ranks: list[int]) -> list[int]:
        """The processes of those of these ranks that torchrun has started on this machine."""
        known = [
            f"process/{rank}" for rank in ranks if started_by_torchrun() and self._store.check([f"process/{rank}"])
        ]
        found = [self._store.get(key).decode().rsplit(" ", 1) for key in known]
        return [int(process) for machine, process in found if machine == _machine()]

    def _listen(self, over: threading.Event) -> None:
        with suppress(RuntimeError):  # the store is gone, which the next communication will notice, too
            while not over.wait(BEAT):
                if not self._store.check(["roll"]):
                    continue
                self._store.set(f"here/{self._world.rank}", "")
                if self._store.check(["verdict"]) and self._ending.acquire(blocking=False):
                    self._end_innocent()

    def _end_innocent(self) -> NoReturn:
        """End as the verdict says, after torchrun had time to notice the rank that has failed."""
        time.sleep(_ANSWER if started_by_torchrun() else 0)
        self._end(int(self._store.get("verdict")))

    def _end(self, status: int) -> NoReturn:
        self._before_exit(status)
        if self._world.rank == 0 and self._world.size > 1 and rank_0_keeps_store():
            time.sleep(BEAT + 1)  # the others need the store to read the verdict
        end_process(status)


def _machine() -> str:
    """This machine, or this container of it: process ids are those of a namespace."""
    return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - it is no path
