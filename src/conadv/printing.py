"""What commands print: a result as lines or as JSON, messages on standard error, and text for any terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout

from conadv.readable import for_json, readable


def report(work: Callable[[], Mapping[str, object]], as_json: bool) -> Mapping[str, object]:
    """Do the work, and print and return its result, which is empty on ranks other than 0."""
    with _diverted() if as_json else nullcontext():
        result = work()
    if result and as_json:
        print(json.dumps(for_json(result)))
    elif result:
        width = max(map(len, result))
        for key, value in result.items():
            print(f"{key:<{width}}  {readable(key, value)}")
    return result


@contextmanager
def _diverted() -> Iterator[None]:
    """Send standard output to standard error, also that of libraries in C++: gloo of PyTorch 2.8 greets each rank."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def say(text: str) -> None:
    """Print one line on standard error."""
    print(" ".join(text.split()), file=sys.stderr)


def allow_any_encoding() -> None:
    """Let standard output and error take every text; without this, a C locale makes `print` fail at the first ×."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
