"""End a process immediately with one line, when other ranks may not answer any more."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from conadv import last_words


def say_line(text: str) -> None:
    """Print one line on standard error, if anything still reads it."""
    with suppress(OSError):
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def say_error(text: str) -> None:
    """Print one line that says what went wrong."""
    say_line(f"error: {text}")


def end_process(status: int) -> NoReturn:
    """Exit immediately: a normal exit would wait for connections to ranks that do not answer."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    last_words.leave()
    os._exit(status)


@contextmanager
def deadline(seconds: float, text: str) -> Iterator[None]:
    """Limit the time within the context: after `seconds`, print `text` and exit with status 1."""

    def give_up() -> None:
        say_error(text)
        end_process(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
