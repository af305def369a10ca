"""Numbers as people read them: durations, counts, percentages; and as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_PERCENT = ("top1", "top5")


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
    if isinstance(value, list | tuple):
        return ", ".join(readable(key, item) for item in value)
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
    return _number(value)


def for_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, with None for infinity and NaN, which JSON does not have."""
    odd = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: None if key in odd else value for key, value in values.items()}


def _number(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
