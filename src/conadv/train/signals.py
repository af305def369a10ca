"""A polite stop: the first SIGTERM or SIGINT is noted and acted on after the step, a second one acts at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """The run was stopped by a signal, and its state is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number


class StopRequest:
    """Whether somebody asked this process to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Within, the first signal is only noted; a second one has its usual effect."""
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        for known in before:
            signal.signal(known, signal.SIG_DFL)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
