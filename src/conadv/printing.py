"""What commands print: results as lines or as JSON, numbers as people read them, and texts for any terminal."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

_PERCENT = ("top1", "top5")


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


def one_line(text: object) -> str:
    """A text of any length and content, or the message of an error, as one line that a terminal can show."""
    words = str(text) or type(text).__name__
    plain = "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in words)
    plain = " ".join(plain.split())
    return plain if len(plain) <= 900 else f"{plain[:600]} ... {plain[-250:]}"


def allow_any_encoding() -> None:
    """Let standard output and error take every text; without this, a C locale makes `print` fail at the first ×."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def duration(seconds: float) -> str:
    """Such as 0.4 s, 40 s, 12 min, 3 h 20 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def readable(key: str, value: object) -> str:
    """A value of a summary with its unit, and with as many digits as a person wants to see."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key == "seed":
        return str(value)
    if key == "seconds":
        return duration(value)
    if key == "epsilon":
        return f"{255 * value:.6g}/255"
    if key.endswith(_PERCENT):
        return f"{value:.2f} %"
    if key == "gap":
        return f"{value:.2f} points"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def for_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, with None for infinity and NaN, which JSON does not have."""
    odd = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: None if key in odd else value for key, value in values.items()}
