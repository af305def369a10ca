"""Whoever dies, fails or stops answering ends the run on every rank, and one line says who it was.

every rank     a thread leaves a sign of life in the store, beat by beat
in an error    its own: the rank says what went wrong          of a peer: whose beats have stopped? who is waited for?
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from .collectives import PeerError, World
from .heartbeats import Heartbeats
from .layout import Layout

# Seconds between two beats of a rank; whoever misses several of them does not live any more.
_BEAT = 0.5
_PATIENCE = 3.0


@contextmanager
def watched(world: World, layout: Layout, agreed: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Within, an error of any rank ends this process: one rank says why, and no status is 0.

    `agreed` are exceptions that all ranks raise in the same step, each knowing that the others do: they pass.
    """
    if world.heartbeats is None:
        yield
        return
    watch = _Watch(world, layout, world.heartbeats)
    with _beating(world, world.heartbeats):
        try:
            yield
        except agreed:
            raise
        except PeerError as error:
            watch.leave_after_peer(error)
        except Exception as error:
            watch.leave(error)


class _Watch:
    """What a rank makes of an error, from the heartbeats of the others."""

    def __init__(self, world: World, layout: Layout, heartbeats: Heartbeats) -> None:
        self._world = world
        self._layout = layout
        self._heartbeats = heartbeats

    def leave(self, error: Exception) -> NoReturn:
        """End this process after an error of its own; the first rank that has one says so."""
        expected = isinstance(error, ValueError | OSError | ArithmeticError)
        if self._heartbeats.claim_report():
            if not expected:
                traceback.print_exception(error)
            name = "" if expected else f"{type(error).__name__}: "
            _say(f"{self._layout.describe(self._world.rank)}: {name}{error}")
        _exit(2 if isinstance(error, ValueError) else 1)

    def leave_after_peer(self, error: PeerError) -> NoReturn:
        """End this process because another one did not answer; the first rank that finds out says which."""
        try:
            verdict = self._verdict(error)
        except RuntimeError:
            verdict = "the store of the run stopped answering: it is kept by the launcher, or by rank 0"
        if self._heartbeats.claim_report():
            _say(verdict)
        _exit(1)

    def _verdict(self, error: PeerError) -> str:
        lost = self._lost()
        if lost:
            names = ", ".join(map(self._layout.describe, lost))
            return f"{names} stopped answering: the run ends on all {self._world.size} ranks"
        busy = [rank for rank in self._others() if not self._heartbeats.awaits(rank)]
        if busy:
            names = ", ".join(map(self._layout.describe, busy))
            return f"{names} kept the others waiting for too long: raise --timeout if a step may take longer"
        return f"{self._layout.describe(self._world.rank)} lost a connection, though every rank lives: {error}"

    def _lost(self) -> list[int]:
        """The ranks that give no sign of life for a while, unless another rank has spoken by then."""
        before = {rank: self._heartbeats.beats(rank) for rank in self._others()}
        lost = list(before)
        end = time.monotonic() + _PATIENCE
        while lost and time.monotonic() < end and not self._heartbeats.has_report():
            time.sleep(_BEAT / 2)
            lost = [rank for rank in lost if self._heartbeats.beats(rank) == before[rank]]
        return lost

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank]


@contextmanager
def _beating(world: World, heartbeats: Heartbeats) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # the store is gone, which the next exchange will notice too
            while not over.is_set():
                heartbeats.beat(world.rank, world.is_waiting.is_set())
                over.wait(_BEAT)

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_PATIENCE)


def _say(text: str) -> None:
    print(" ".join(f"error: {text}".split()), file=sys.stderr, flush=True)


def _exit(status: int) -> NoReturn:
    """At once: connections to ranks that do not answer would keep an orderly end waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
