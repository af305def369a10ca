"""Which lines of the source each test executes, also in its rank processes, and its cost in processor seconds.

A pytest plugin of `mutants.py`. With CONADV_COVERING=FOLDER every process appends one line of JSON per test to a file
of its own; otherwise `recording` does nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

_SOURCE = f"{os.sep}src{os.sep}conadv{os.sep}"


@contextmanager
def recording(test: str = "") -> Iterator[None]:
    """Within, note the lines that this process executes for a test; by default for the one that pytest names."""
    if "CONADV_COVERING" not in os.environ:
        yield
        return
    lines: dict[str, set[int]] = defaultdict(set)
    process, began, began_wall = os.getpid(), time.process_time(), time.monotonic()

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if _SOURCE in frame.f_code.co_filename else None

    def line(frame: FrameType, event: str, _: Any) -> Any:
        lines[frame.f_code.co_filename].add(frame.f_lineno)
        return line

    def write() -> None:
        sys.settrace(None)
        name = test or os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        found = {path.rpartition(_SOURCE)[2]: sorted(numbers) for path, numbers in list(lines.items())}
        used = time.process_time() - (began if os.getpid() == process else 0)  # that of a fork begins at 0
        seconds = {"seconds": used, "wall": time.monotonic() - began_wall}
        with (Path(os.environ["CONADV_COVERING"]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps({"test": name, **seconds, "lines": found}) + "\n")

    end = os._exit
    os._exit = lambda status: (write(), end(status))  # type: ignore[assignment,func-returns-value,return-value]
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        os._exit = end
        write()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with recording(item.nodeid):
        return (yield)
