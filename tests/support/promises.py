"""Which cases of a promise run every time: a few of them in `make test`, all of them in `make promises`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def few(cases: Iterable[tuple[Any, ...]], always: Callable[..., bool]) -> list[Any]:
    """The cases for `parametrize`; those for which `always` is false wait for `make promises`."""
    return [pytest.param(*case, marks=() if always(*case) else pytest.mark.promise) for case in cases]
