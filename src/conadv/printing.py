"""What commands print: a result as lines or as one JSON object, and messages on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout

from conadv.readable import readable


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
        print(f"{key:<{width}}  {readable(key, value)}")


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def say(text: str) -> None:
    """Print one line on standard error."""
    print(" ".join(text.split()), file=sys.stderr)
