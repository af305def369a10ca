"""Numbers that are waited for without blocking."""

from __future__ import annotations

import pytest

from conadv.ranks import reading


def test_it_asks_at_once_and_then_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 10 microseconds to a millisecond, so that what comes soon is noticed soon."""
    pauses: list[float] = []
    monkeypatch.setattr(reading.time, "sleep", pauses.append)
    reading.poll(lambda: len(pauses) == 10, timeout=60)
    assert pauses == [1e-5 * 2**number for number in range(7)] + [1e-3] * 3
