"""If a rank crashes, hangs or raises an error, all ranks end, and one line names it.

every rank           one thread writes heartbeats to the store and reads the verdict there; another ends waits that
                     exceed the timeout
an error of its own  the rank prints it, and publishes the verdict
an error of a peer   the first rank that has one finds out whose heartbeats stopped or which rank the others wait for,
                     prints it, and publishes the verdict; the others wait for the verdict

Every wait ends at most 15 seconds after the timeout: 2 until the thread ends a wait that did not end by itself, 7 to
see which heartbeats stopped, 5 until the verdict is read.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

from conadv.memory import ADVICE, is_out_of_memory

from .collectives import GRACE, PeerError, World
from .ending import end_process, say_error, say_line
from .heartbeats import Heartbeats, Verdict
from .launch import rank_0_keeps_store
from .layout import Layout

# Seconds between two heartbeats of a rank, and between two after an error.
_BEAT = 5.0
_HASTE = 1.0
# Seconds without a heartbeat after which a rank is lost.
_PATIENCE = _BEAT + 2.0


@contextmanager
def watched(
    world: World,
    layout: Layout,
    agreed: tuple[type[BaseException], ...] = (),
    before_exit: Callable[[int], None] = lambda status: None,
    hint: str = "raise --timeout",
) -> Iterator[Callable[[int, str], None]]:
    """End all processes if any rank has an error within the context; one rank prints it, and no exit status is 0.

    It yields a function that ends all ranks immediately, from any thread, with an exit status and a message.

    Args:
        world: The ranks.
        layout: Their roles, for messages.
        agreed: Exceptions that all ranks raise in the same step; they are raised as usual.
        before_exit: Called with the exit status before the process ends immediately.
        hint: The advice if a step takes longer than the timeout.
    """
    if world.heartbeats is None:
        yield partial(_leave_alone, before_exit)
        return
    watch = _Watch(world, layout, world.heartbeats, before_exit, hint)
    with watch.beating():
        try:
            yield watch.leave_with_all
        except agreed:
            raise
        except PeerError as error:
            watch.leave_after_peer(str(error))
        except Exception as error:
            watch.leave(error)


def _leave_alone(before_exit: Callable[[int], None], status: int, text: str) -> None:
    say_line(text)
    before_exit(status)
    end_process(status)


class _Watch:
    """Ends this process after an error of any rank, with the verdict of the first rank that has one."""

    def __init__(
        self,
        world: World,
        layout: Layout,
        heartbeats: Heartbeats,
        before_exit: Callable[[int], None],
        hint: str,
    ) -> None:
        self._world = world
        self._layout = layout
        self._heartbeats = heartbeats
        self._before_exit = before_exit
        self._hint = hint
        self._over = threading.Event()  # the context was left
        self._failing = threading.Event()  # a peer does not answer
        self._wake = threading.Event()  # set with either of them
        self._ending = threading.Lock()  # held by the thread that ends the process

    @contextmanager
    def beating(self) -> Iterator[None]:
        threads = [threading.Thread(target=work, name=work.__name__, daemon=True) for work in (self._beat, self._guard)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._wake.set()
            for thread in threads:
                thread.join(GRACE)

    def leave(self, error: Exception) -> NoReturn:
        """End this process after an error of its own; the first rank with an error prints it."""
        self._ending.acquire()
        full = is_out_of_memory(error)
        expected = full or isinstance(error, ValueError | OSError | ArithmeticError)
        status = 2 if isinstance(error, ValueError) else 1
        if self._speaks():
            if not expected:
                traceback.print_exception(error)
            name = "" if expected else f"{type(error).__name__}: "
            self._report(
                Verdict(status, f"{self._layout.describe(self._world.rank)}: {name}{ADVICE if full else error}")
            )
        self._end(status, lost=0)

    def leave_with_all(self, status: int, text: str) -> None:
        """End this process and all others; the first rank that calls it prints why."""
        self._ending.acquire()
        if self._speaks():
            say_line(text)
            self._publish(Verdict(status, text, 0))
        self._end(status, lost=0)

    def leave_after_peer(self, reason: str) -> NoReturn:
        """End this process because a peer does not answer, with the verdict of the first rank that noticed."""
        self._failing.set()
        self._wake.set()
        try:
            if not self._heartbeats.claim_report():
                time.sleep(_PATIENCE + 2 * _HASTE)  # the verdict ends this process before that
            verdict = self._investigate(reason)
            if not self._heartbeats.claim_verdict():  # on a busy machine, several ranks may have investigated
                time.sleep(_BEAT)
        except RuntimeError:
            self._leave_without_store()
        self._ending.acquire()
        self._report(verdict)
        self._end(verdict.status, verdict.lost)

    def _leave_without_store(self) -> NoReturn:
        self._ending.acquire(timeout=GRACE)
        if rank_0_keeps_store():
            say_error(f"{self._layout.describe(0)} stopped answering: the run ends on all {self._world.size} ranks")
        else:
            say_error("the launcher, which hosts the store of the run, stopped answering: the run ends")
        self._before_exit(1)
        end_process(1)

    def _investigate(self, reason: str) -> Verdict:
        lost, busy = self._lost_and_busy()
        names = ", ".join(map(self._layout.describe, lost or busy))
        if lost:
            text = f"{names} stopped answering: the run ends on all {self._world.size} ranks"
        elif busy:
            text = f"{names} kept the others waiting for too long: {self._hint} if a step may take longer"
        else:
            names = self._layout.describe(self._world.rank)
            text = f"{names} lost a connection, though all ranks are alive: {reason}"
        return Verdict(1, text, len(lost))

    def _lost_and_busy(self) -> tuple[list[int], list[int]]:
        """Return the ranks that write no heartbeats, and the ranks that do not wait for others."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        before = self._heartbeats.look()
        now, lost = before, others
        end = time.monotonic() + _PATIENCE
        while lost and time.monotonic() < end:
            time.sleep(_HASTE)
            now = self._heartbeats.look()
            lost = [rank for rank in lost if now[rank].beats == before[rank].beats]
        return lost, [rank for rank in others if not now[rank].awaits]

    def _speaks(self) -> bool:
        try:
            return self._heartbeats.claim_report() and self._heartbeats.claim_verdict()
        except RuntimeError:  # without the store, several ranks may print it, which is better than none
            return True

    def _report(self, verdict: Verdict) -> None:
        say_error(verdict.text)
        self._publish(verdict)

    def _publish(self, verdict: Verdict) -> None:
        with suppress(RuntimeError):
            self._heartbeats.publish(verdict)

    def _end(self, status: int, lost: int) -> NoReturn:
        self._before_exit(status)
        with suppress(RuntimeError):
            if self._world.is_main and rank_0_keeps_store():  # the others need the store to read the verdict
                end = time.monotonic() + _BEAT + GRACE
                while time.monotonic() < end and self._heartbeats.left() < self._world.size - 1 - lost:
                    time.sleep(_HASTE / 5)
            else:
                self._heartbeats.leave()
        end_process(status)

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone, which the next communication will notice, too
            while not self._over.is_set():
                verdict = self._heartbeats.beat(self._world.is_waiting)
                if verdict is not None:
                    self._obey(verdict)
                self._pause()

    def _pause(self) -> None:
        if self._failing.is_set():
            self._over.wait(_HASTE)
        else:
            self._wake.wait(_BEAT)

    def _obey(self, verdict: Verdict) -> None:
        """End this process with the verdict of another rank, unless it is ending already."""
        if not self._over.is_set() and self._ending.acquire(blocking=False):
            self._end(verdict.status, verdict.lost)

    def _guard(self) -> None:
        """End the process if a wait exceeds the timeout."""
        while not self._over.wait(GRACE / 4):
            if not self._failing.is_set() and self._world.waited() > self._world.timeout + GRACE:
                self.leave_after_peer(f"no answer within {self._world.timeout:g} seconds")
