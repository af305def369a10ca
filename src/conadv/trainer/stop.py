"""A graceful stop: the first SIGTERM or SIGINT takes effect after the step, a second one immediately.

Before the first step there is nothing to save, and the first signal takes effect immediately, too. A thread reads the
signals, because the main thread may be waiting for another rank, where Python runs no signal handlers.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from conadv import last_words
from conadv.last_words import end_process, say_line
from conadv.ranks.launch import local_rank, own_rank

_HEARD = (signal.SIGTERM, signal.SIGINT)
# Seconds in which a second signal is ignored: `timeout` and some schedulers send each one twice.
_ONE_REQUEST = 1.0
# Seconds between two checks that torchrun is alive.
_LOOK = 1.0


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """The run was stopped by a signal, and its state is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


class StopRequest:
    """The first signal that asked this process to stop, in `signal`, which the loop reads after each step.

    `obey`, if it is not None, is called with each signal immediately, to end the process.
    """

    def __init__(self, obey: Callable[[int], None] | None = None) -> None:
        self.signal: int | None = None
        self._obey = obey
        self._lock = threading.RLock()  # a signal may interrupt the main thread while it holds the lock

    def take(self, number: int) -> None:
        """Record a signal, and obey it if signals take effect immediately."""
        with self._lock:
            self.signal = self.signal or number
            if self._obey is not None:
                self._obey(number)

    def obey_by(self, obey: Callable[[int], None] | None) -> None:
        """Replace `obey`; None: signals take effect after the step from now on."""
        with self._lock:
            self._obey = obey


@contextmanager
def listening(ends_process: bool = True) -> Iterator[StopRequest]:
    """Handle SIGTERM and SIGINT within the context: immediately, or after `obey_by(None)` at the end of the step.

    A second signal then ends the process immediately, if it comes more than a second after the first. The end of
    torchrun is like SIGTERM: otherwise its ranks would continue, and write into the folder of the run that replaces
    them. If signals may not end the process, as in a notebook, the first one raises Interrupted. Outside the main
    thread, where Python allows no signal handlers, nothing changes.
    """
    request = StopRequest(_leave if ends_process else _interrupt)
    if threading.current_thread() is not threading.main_thread():
        request.obey_by(None)
        yield request
    elif not ends_process:
        with _handling(lambda number, _: request.take(number)):
            yield request
    else:
        with _read_by_thread(request), _handling(lambda *_: None):
            yield request


def stopped_early(signal_number: int, advice: str = "start it again with the same command") -> str:
    """Return the message about a stop before the first step."""
    return f"{Interrupted(signal_number)} before the first step: nothing is lost; {advice}"


def _leave(signal_number: int) -> None:
    """End a process that has not joined the other ranks yet."""
    if own_rank() == 0:
        say_line(stopped_early(signal_number))
    end_process(128 + signal_number)


def _interrupt(signal_number: int) -> None:
    raise Interrupted(signal_number)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _HEARD}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def _read_by_thread(request: StopRequest) -> Iterator[None]:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(reader, request), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        writer.close()
        thread.join()
        reader.close()


def _listen(reader: socket.socket, request: StopRequest) -> None:
    """Record the first signal, and end the process at a later one; return when the socket is closed."""
    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun
    first: float | None = None
    reader.settimeout(_LOOK)
    while True:
        try:
            numbers = reader.recv(1)
        except TimeoutError:
            if parent is not None and os.getppid() != parent:
                if local_rank() == 0:
                    say_line(f"torchrun (process {parent}) is gone: stopping")
                parent = None
                request.take(signal.SIGTERM)
            continue
        if not numbers:
            return
        if numbers[0] not in _HEARD:
            continue
        if first is None:
            first = time.monotonic()
            request.take(numbers[0])
        elif time.monotonic() - first > _ONE_REQUEST:
            last_words.leave()
            os._exit(128 + numbers[0])
