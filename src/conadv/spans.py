"""Named spans of a step for the profiler. They cost nothing unless a profile is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

# The parts of a step, in the order of the timeline.
SPANS = ("load", "attack", "clean pass", "adversarial pass", "hand-off", "gradient sum", "update")
STEP = "step"
# The prefix of spans in a trace, which tells them from other events.
PREFIX = "conadv: "

_recording = False


@contextmanager
def recording() -> Iterator[None]:
    """Record spans in the profiler, within this context."""
    global _recording
    _recording = True
    try:
        yield
    finally:
        _recording = False


def span(name: str) -> AbstractContextManager[object]:
    """A span of time with one of the names of SPANS, or STEP."""
    return record_function(PREFIX + name) if _recording else nullcontext()
