"""What a step of vanilla as `conadv train` takes it does beyond the plainest loop: counted, and timed in turn.

python benchmarks/overhead.py --width 32 --chunk-size 128 --rounds 20

Counts do not depend on what else the machine does: operators that start work, blocks of memory asked for, and pages of
memory that the system had to hand out. The ratios of times do, so run it on a quiet machine.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from conadv.study.bench.alternate import Tell, alternate
from conadv.study.bench.command import Measurement
from conadv.study.bench.result import Findings, Goal, work_ratio
from conadv.study.bench.step import plainest
from conadv.study.bench.workload import Workload
from scripts import run_workload

_STEPS = 5
_GOAL = Goal("≤", 1.02)


@dataclass(frozen=True)
class Counts:
    """What one step asks of the machine."""

    operators: int
    allocations: int
    megabytes: float
    """Of all allocations together."""
    page_faults: int
    """The fewest of some steps."""

    def __str__(self) -> str:
        return (
            f"{self.operators} operators, {self.allocations} allocations of {self.megabytes:.1f} MB, "
            f"{self.page_faults} page faults"
        )


class _Operators(TorchDispatchMode):
    """Counts operators that start work, which views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += not function.is_view and function.overloadpacket is not torch.ops.aten.detach
        return function(*arguments, **(options or {}))


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """The ratios of times to the plainest loop, with the counts of each as notes."""
    steps = plainest(workload)
    counts = {name: counted(step) for name, step in steps.items()}
    laps = alternate(steps, rounds, tell=tell)
    ratios = [work_ratio(laps, name, "plain", _GOAL) for name in ("vanilla", "train")]
    return Findings(ratios, notes=[f"{name}: {found}" for name, found in counts.items()])


def counted(step: Callable[[], object]) -> Counts:
    """The counts of a step after the first ones, which look for misuse and ask for memory."""
    for _ in range(_STEPS):
        step()
    faults = min(_faults(step) for _ in range(_STEPS))
    with _Operators() as operators:
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    sizes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    asked = [size for size in sizes if size > 0]
    return Counts(operators.count, len(asked), sum(asked) / 1e6, faults)


def _faults(step: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


if __name__ == "__main__":
    run_workload("overhead", Measurement(measure, Workload(), 20), __doc__)
