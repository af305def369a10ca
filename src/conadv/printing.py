"""What commands print: a result as lines or as one JSON object, and messages on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout


def report(work: Callable[[], Mapping[str, object]], as_json: bool) -> None:
    """Do the work and print the result; it is empty on ranks other than 0."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        result = work()
    if not result:
        return
    if as_json:
        # JSON has no infinity and no NaN.
        print(json.dumps({key: None if _is_odd(value) else value for key, value in result.items()}))
        return
    width = max(map(len, result))
    for key, value in result.items():
        print(f"{key:<{width}}  {_readable(key, value)}")


def _readable(key: str, value: object) -> str:
    """Format a value for people: four significant digits, and epsilon in 255ths."""
    if key == "epsilon" and isinstance(value, float):
        return f"{255 * value:.6g}/255"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return "none" if value is None else str(value)


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def say(text: str) -> None:
    """Print one line on standard error."""
    print(" ".join(text.split()), file=sys.stderr)
