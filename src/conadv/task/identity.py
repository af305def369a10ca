"""What tells one data set from another: ranks compare it at the start, and runs when they are resumed or evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from conadv.printing import one_line, readable
from conadv.task.data.source import DataSet

_PIXELS = "training pixels"


def identity(data: DataSet) -> dict[str, Any]:
    """Facts about a data set, as JSON values."""
    return {
        "classes": list(data.train.classes),
        "training images": len(data.train),
        "training labels": _digest(data.train.labels.tobytes()),
        _PIXELS: _digest(data.train.image(0).tobytes()),  # all would take minutes
        "test images": len(data.test),
        "test labels": _digest(data.test.labels.tobytes()),
    }


def difference(data: DataSet, before: Mapping[str, Any], classes_only: bool) -> str:
    """Say what differs from the facts of before, such as "training images 1,270, then 1,143"; empty: nothing.

    Pixels do not count: another release of a decoder may round some of them differently.
    """
    for name, now in identity(data).items():
        counts = name == "classes" or not (classes_only or name == _PIXELS)
        if counts and before.get(name, now) != now:
            then, is_now = (one_line(readable(name, value)) for value in (before[name], now))
            return f"{name} {then}, then {is_now}"
    return ""


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()[:12]
