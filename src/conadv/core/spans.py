"""Named spans of time for the profiler: what a step does when. They cost nothing while no profile is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

# What a step consists of, in the order in which a picture lists it.
SPANS = ("load", "attack", "clean pass", "adversarial pass", "hand-off", "gradient sum", "update")
STEP = "step"
# How the names of spans begin in a trace, so that nothing else is taken for one.
PREFIX = "conadv: "

_recording = False


@contextmanager
def recording() -> Iterator[None]:
    """Within, spans reach the profiler."""
    global _recording
    _recording = True
    try:
        yield
    finally:
        _recording = False


def span(name: str) -> AbstractContextManager[object]:
    """A span of time with one of the names of SPANS, or STEP."""
    return record_function(PREFIX + name) if _recording else nullcontext()
