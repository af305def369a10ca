"""The parts of a step in the trace of PyTorch's profiler, which `conadv timeline` draws."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

# The parts of a step, in the order of the timeline.
SPANS = ("load", "attack", "clean pass", "adversarial pass", "hand-off", "gradient sum", "update")
STEP = "step"
# The prefix of spans in a trace, which tells them from other events.
PREFIX = "conadv: "


def span(name: str) -> AbstractContextManager[object]:
    """A span of time with one of the names of SPANS, or STEP; costs nothing unless a profiler records."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else nullcontext()
