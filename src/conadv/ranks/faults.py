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
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from conadv import last_words
from conadv.memory import ADVICE, is_out_of_memory

from .ending import end_process, say_error, say_line
from .launch import rank_0_keeps_store, started_by_torchrun
from .layout import Layout
from .world import World

# Seconds between two looks into the store, and those that answers to the roll are waited for.
BEAT, PATIENCE = 5.0, 8.0
# Seconds in which the store answers, or torchrun notices a rank that has failed.
_ANSWER = 3.0
_GUARDS = count()  # several teams in one process group use different keys in its store
_TIMED_OUT = ("timed out", "timeout", "time out")


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
    if world.size == 1:
        yield partial(_leave_alone, before_exit)
        return
    last_words.rename(layout.describe(world.rank))
    guard = _Guard(world, layout, before_exit, asked, hint)
    with guard.listening():
        try:
            yield guard.leave_with_all
        except agreed as error:
            guard.publish(2 if isinstance(error, ValueError) else 1, str(error))
            raise
        except Exception as error:
            if _is_of_peer(error):
                guard.leave_after_peer(error)
            if raises:
                guard.publish(1, f"{type(error).__name__}: {error}")
                error.add_note(f"on {layout.describe(world.rank)}: the run ends on all {world.size} ranks")
                raise
            guard.leave(error)


def _is_of_peer(error: Exception) -> bool:
    """Whether an error says that another rank does not answer: Gloo's are known by their text only."""
    text = str(error).lower()
    words = ("gloo", "pair closure", "connection closed by peer", "connection reset by peer", "timed out waiting")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _tell_torchrun(text: str) -> None:
    """Leave a line where torchrun looks for the reason of a rank that failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    about = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError):
        if path:
            Path(path).write_text(json.dumps({"message": about}))


def _leave_alone(before_exit: Callable[[int], None], status: int, text: str) -> None:
    say_line(text)
    before_exit(status)
    end_process(status)


class _Guard:
    """Ends this process after an error of any rank."""

    def __init__(
        self,
        world: World,
        layout: Layout,
        before_exit: Callable[[int], None],
        asked: Callable[[], bool],
        hint: str,
    ) -> None:
        self._world, self._layout, self._before_exit, self._asked, self._hint = world, layout, before_exit, asked, hint
        kept: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"conadv-faults-{next(_GUARDS)}", kept)  # type: ignore[attr-defined]
        self._over = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends the process
        self._speaks = False  # this rank is about to print why the run ends
        self._verdict: tuple[int, str] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._store.set(f"process/{self._world.rank}", f"{socket.gethostname()} {os.getpid()}")
        thread = threading.Thread(target=self._listen, name="faults", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_ANSWER)

    def publish(self, status: int, text: str) -> bool:
        """Leave a verdict in the store, and for torchrun in the file of this rank; True for the first rank that does.

        From now on this rank ends by itself.
        """
        self._speaks = True
        with suppress(RuntimeError):
            if self._store.add("claims", 1) > 1:
                return False
            self._store.set("verdict", str(status))
            self._store.set("roll", "")
        _tell_torchrun(text)
        return True

    def leave(self, error: Exception) -> NoReturn:
        """End this process after an error of its own, which it prints."""
        self._ending.acquire()
        full = is_out_of_memory(error)
        expected = full or isinstance(error, ValueError | OSError | ArithmeticError)
        status = 2 if isinstance(error, ValueError) else 1
        if not expected:
            traceback.print_exception(error)
        name = "" if expected else f"{type(error).__name__}: "
        text = f"{self._layout.describe(self._world.rank)}: {name}{ADVICE if full else error}"
        self._say_first(status, text, say_error)
        self._end(status)

    def leave_with_all(self, status: int, text: str) -> None:
        """End this process and all others; the first rank that calls it prints why."""
        self._ending.acquire()
        self._say_first(status, text, say_line)
        self._end(status)

    def leave_after_peer(self, error: Exception) -> NoReturn:
        """End this process because another rank does not answer."""
        with suppress(ValueError):  # outside the main thread; torchrun ends this process once it has noticed
            signal.signal(signal.SIGTERM, lambda *_: None if self._speaks else end_process(128 + signal.SIGTERM))
        caller = threading.Thread(target=self._call_roll, args=(error,), name="roll", daemon=True)
        caller.start()
        caller.join(PATIENCE + 2 * _ANSWER)
        self._ending.acquire()
        keeper = "the launcher, which hosts the store of the run,"
        keeper = self._layout.describe(0) if rank_0_keeps_store() else keeper
        status, text = self._verdict or (1, f"{keeper} stopped answering: the run ends on all {self._world.size} ranks")
        if text:
            say_error(text)
        self._end(status)

    def _say_first(self, status: int, text: str, say: Callable[[str], None]) -> None:
        if self.publish(status, text):
            say(text)

    def _call_roll(self, error: Exception) -> None:
        """Find out which ranks do not answer; the first rank to ask says so, and ends them if it can."""
        ranks = [rank for rank in range(self._world.size) if rank != self._world.rank]
        with suppress(RuntimeError):
            self._store.set(f"failing/{self._world.rank}", "")
            self._store.set("roll", "")
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and not self._store.check([f"failing/{rank}" for rank in ranks]):
                if self._asked():
                    self._verdict = 128 + signal.SIGTERM, ""
                    return
                if self._store.check(["verdict"]):
                    break
                time.sleep(min(0.5, BEAT))
            if self._store.add("claims", 1) > 1:
                time.sleep(_ANSWER if started_by_torchrun() else BEAT)
                self._verdict = int(self._store.get("verdict")) if self._store.check(["verdict"]) else 1, ""
                return
            self._speaks = True
            self._verdict = 1, self._judge(ranks, error)
            self._store.set("verdict", "1")

    def _judge(self, ranks: list[int], error: Exception) -> str:
        """Say which of the other ranks do not answer, or else keep the others waiting; and end them, if possible."""
        lost = [rank for rank in ranks if not self._store.check([f"here/{rank}"])]
        if not lost and any(word in str(error).lower() for word in _TIMED_OUT):
            busy = [rank for rank in ranks if not self._store.check([f"failing/{rank}"])]
        else:
            busy = []
        text = self._text(lost, busy, error)
        if not self._end_hung(lost or busy):
            _tell_torchrun(text)
        return text

    def _text(self, lost: list[int], busy: list[int], error: Exception) -> str:
        names, waited = ", ".join(map(self._layout.describe, lost or busy)), f"{self._world.timeout:g} seconds"
        if lost:
            return f"{names} stopped answering: the run ends on all {self._world.size} ranks"
        if busy:
            return f"{names} kept the others waiting for {waited}: {self._hint} if a step may take longer"
        reason = " ".join(str(error).split())
        return f"{self._layout.describe(self._world.rank)} lost a connection, though all ranks are alive: {reason}"

    def _end_hung(self, ranks: list[int]) -> bool:
        """Kill ranks of this machine that do not answer: torchrun then names them, and not the first that noticed."""
        killed = False
        for rank in ranks if started_by_torchrun() else ():
            host, number = self._store.get(f"process/{rank}").decode().rsplit(" ", 1)
            with suppress(OSError):
                if host == socket.gethostname():
                    os.kill(int(number), signal.SIGKILL)
                    killed = True
        time.sleep(0.5 * killed)  # the witness of that rank prints first
        return killed

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the store is gone, which the next communication will notice, too
            while not self._over.wait(BEAT):
                if not self._store.check(["roll"]):
                    continue
                self._store.set(f"here/{self._world.rank}", "")
                if not self._speaks and self._store.check(["verdict"]) and self._ending.acquire(blocking=False):
                    time.sleep(_ANSWER if started_by_torchrun() else 0)
                    self._end(int(self._store.get("verdict")))

    def _end(self, status: int) -> NoReturn:
        self._before_exit(status)
        if self._world.rank == 0 and rank_0_keeps_store():
            time.sleep(BEAT + 1)  # the others need the store to read the verdict
        end_process(status)
