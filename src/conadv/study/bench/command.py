"""`conadv bench`: its flags, the benchmarks by name, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args

from cyclopts import Parameter

from conadv.task.models import check_output

from . import attack, lars, layout, step
from .alternate import Tell
from .machine import describe, one_core
from .progress import progress
from .result import Findings
from .table import render
from .workload import Workload

Benchmark = Literal["step", "attack", "lars", "layout"]

_WHICH = """What to measure; none: all, one after the other.
step: each method against vanilla, vanilla against the plainest loop, and the passes that conadv plan reads.
attack: one step of PGD against foolbox, and DisAdv against a loop put together from foolbox.
lars: an update against torch.optim.SGD and pytorch_optimizer's LARS.
layout: roles on ranks of their own against vanilla on as many."""


class _Measurement(NamedTuple):
    measure: Callable[[Workload, int, Tell], Findings]
    rounds: int
    """How many take about a minute."""
    one_core: bool = True
    """Whether it runs in this process."""


_MEASUREMENTS: dict[Benchmark, _Measurement] = {
    "step": _Measurement(step.measure, step.ROUNDS),
    "attack": _Measurement(attack.measure, attack.ROUNDS),
    "lars": _Measurement(lars.measure, lars.ROUNDS),
    "layout": _Measurement(layout.measure, layout.ROUNDS, one_core=False),
}


def bench(
    which: Annotated[Benchmark | None, Parameter(help=_WHICH)] = None,
    /,
    *,
    rounds: Annotated[int | None, Parameter(help="How often each candidate is timed; none: about a minute.")] = None,
    model: Annotated[str | None, Parameter(help="A network; none: resnet20, and resnet50 for lars.")] = None,
    width: Annotated[int | None, Parameter(help="Channels of its first stage; none: its own default.")] = None,
    chunk_size: Annotated[int, Parameter(help="Images that a rank learns from in a step.")] = Workload.chunk_size,
    image_size: Annotated[int, Parameter(help="Their height and width.")] = Workload.image_size,
    json_: Annotated[bool, Parameter(name="--json", help="Print one JSON object.", negative="")] = False,
) -> None:
    """Time candidates in turn, on one core each, and say by which ratio they differ, with the spread."""
    names = get_args(Benchmark) if which is None else (which,)
    workload = Workload(model or Workload.model, width, chunk_size, image_size)
    with redirect_stdout(sys.stderr) if json_ else nullcontext():
        document = run(names, workload, rounds, large_model=model is None)
    print(json.dumps(document) if json_ else render(document))


def run(names: Sequence[Benchmark], workload: Workload, rounds: int | None, large_model: bool = True) -> dict[str, Any]:
    """What `--json` prints: the machine, the results of all these benchmarks, where time goes, and notes.

    large_model: let lars have ResNet-50 instead of the network of the others.
    """
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds {rounds}: take at least 1")
    check_output(workload.build(), workload.shape, workload.classes)
    document: dict[str, Any] = {"machine": describe(), "workload": asdict(workload)}
    document |= {"results": [], "profile": [], "notes": []}
    for name in names:
        found = _measure(name, _sized(workload, name, large_model), rounds)
        document["results"] += [{"benchmark": name, **result.to_json()} for result in found.results]
        document["profile"] += [{"benchmark": name, **row} for row in found.profile]
        document["notes"] += [f"{name}: {note}" for note in found.notes]
    return document


def _sized(workload: Workload, name: Benchmark, large_model: bool) -> Workload:
    large = large_model and name == "lars"
    return replace(workload, model="resnet50", width=None, classes=1000) if large else workload


def _measure(name: Benchmark, workload: Workload, rounds: int | None) -> Findings:
    measurement = _MEASUREMENTS[name]
    with one_core() if measurement.one_core else nullcontext():
        return measurement.measure(workload, rounds or measurement.rounds, progress(name))
