"""A graceful stop: the first SIGTERM or SIGINT takes effect after the step, a second one at once.

Signals are read by a thread, because the main one may wait for another rank, where Python notices none.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from conadv.parallel.launch import local_rank, started_by_torchrun

_HEARD = (signal.SIGTERM, signal.SIGINT)
# Seconds in which signals are the same request: `timeout` and some schedulers send each one twice.
_ONE_REQUEST = 1.0
# Seconds between two looks at the process that started this one.
_LOOK = 1.0


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """The run was stopped by a signal, and its state is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


class StopRequest:
    """The signal that asked this process to stop; None: none did."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def listening(ends_process: bool = True) -> Iterator[StopRequest]:
    """Within, the first signal is only noted; another one, a second or more after it, ends the process.

    Outside the main thread, where Python allows no signal handlers, signals do what they did before.

    Args:
        ends_process: Whether a second signal ends the process; not where the process is someone's notebook.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _HEARD}
    thread = threading.Thread(target=_listen, args=(reader, request, ends_process), name="signals", daemon=True)
    thread.start()
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        writer.close()
        thread.join()
        reader.close()


@contextmanager
def following_launcher(request: StopRequest) -> Iterator[None]:
    """Within, the end of torchrun, which started this process, is a request to stop like a signal.

    Without it, ranks whose torchrun was killed would keep running, and write into the folder of the
    run that replaces them.
    """
    over = threading.Event()
    parent = os.getppid()

    def look() -> None:
        while not over.wait(_LOOK):
            if os.getppid() != parent:
                if local_rank() == 0:
                    with suppress(OSError):
                        print(f"torchrun (process {parent}) is gone: stopping after this step", file=sys.stderr)
                request.signal = request.signal or signal.SIGTERM
                return

    thread = threading.Thread(target=look, name="launcher", daemon=True)
    if started_by_torchrun():
        thread.start()
    try:
        yield
    finally:
        over.set()


def _listen(reader: socket.socket, request: StopRequest, ends_process: bool) -> None:
    """Note the first signal, and end the process at a later one; ends when the other side is closed."""
    first = 0.0
    while numbers := reader.recv(1):
        if numbers[0] not in _HEARD:
            continue
        if request.signal is None:
            request.signal, first = numbers[0], time.monotonic()
        elif ends_process and time.monotonic() - first > _ONE_REQUEST:
            os._exit(128 + numbers[0])
