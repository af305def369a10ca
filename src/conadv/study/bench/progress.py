"""Progress of a benchmark for whoever watches: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from .alternate import Tell

_SECONDS_BETWEEN_LINES = 5.0


def progress(label: str, stream: TextIO | None = None) -> Tell:
    """To be told after each round."""
    stream = stream or sys.stderr
    began = told = last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal began, told, last
        if done == 1:  # the first round began when the last measurement ended
            began = told
        told = now = time.monotonic()
        left = (now - began) / done * (total - done)
        text = f"{label}: round {done} of {total}, {left:.0f} s left"
        if stream.isatty():
            # The rest of a longer line before it is erased.
            print(f"\r\033[K{text}", end="\n" if done == total else "", file=stream, flush=True)
        elif done == total or now - last > _SECONDS_BETWEEN_LINES:
            last = now
            print(text, file=stream, flush=True)

    return tell
