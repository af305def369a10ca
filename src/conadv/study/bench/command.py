"""`conadv bench`: a flag for each size, the benchmarks by name, and what is printed."""

from __future__ import annotations

import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields
from typing import Annotated, Any, NamedTuple

import torch
from cyclopts import App, Parameter

from conadv.flags import flag, with_flags
from conadv.setting import descriptions, did_you_mean, settings_of
from conadv.study.origin import processor
from conadv.study.pool import usable_cores
from conadv.task.models import check_output
from conadv.trainer.folder import versions

from . import layout, step
from .alternate import Tell, progress
from .ranks import one_core
from .result import Findings
from .table import render
from .workload import Workload

_WHICH = """What to measure; none: both, one after the other.
step: each method against vanilla, vanilla against the plainest loop, and the passes that conadv plan reads.
layout: roles on ranks of their own against vanilla on as many."""
# Comparisons that need other libraries, and measurements for developers.
_SCRIPTS = ("attack", "lars", "data", "reduction", "composed", "step_parts")


class Measurement(NamedTuple):
    """One benchmark, ready to run."""

    measure: Callable[[Any, int, Tell], Findings]
    sizes: Any
    """A dataclass, which is printed with the results."""
    rounds: int
    one_core: bool = True
    """Whether all of it runs in this process."""


def bench_command(
    which: Annotated[str | None, Parameter(help=_WHICH)] = None,
    /,
    *,
    rounds: Annotated[int | None, Parameter(help="How often each candidate is timed; none: about a minute.")] = None,
    json_: Annotated[bool, Parameter(name="--json", help="Print one JSON object.", negative="")] = False,
    **sizes: Any,
) -> None:
    """Time candidates in turn, on one core each, and print by which ratio they differ, with the spread."""
    settings = {setting.key: setting for setting in settings_of(Workload)}
    given: dict[str, Any] = {name: settings[name].parse(text) for name, text in sizes.items() if text is not None}
    workload = Workload(**given)
    known = {
        "step": Measurement(step.measure, workload, rounds or step.ROUNDS),
        "layout": Measurement(layout.measure, workload, rounds or layout.ROUNDS, one_core=False),
    }
    if which in _SCRIPTS:
        raise ValueError(f"the benchmark {which} is a script of the repository: run python benchmarks/{which}.py")
    if which is not None and which not in known:
        raise ValueError(f"unknown benchmark {which!r}: choose step or layout" + did_you_mean(which, known))
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds {rounds}: take at least 1")
    check_output(workload.build(), workload.shape, workload.classes)
    report(known if which is None else {which: known[which]}, json_)


def report(measurements: Mapping[str, Measurement], as_json: bool) -> None:
    """Run benchmarks and print what they found: a table, or one JSON object."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        document = _run(measurements)
    print(json.dumps(document, default=str) if as_json else render(document))


def run_script(main: Callable[..., None]) -> None:
    """Run the command of a script: bad input is one line and exit status 2."""
    app = App(help_format="plaintext")
    app.default(main)
    try:
        app()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _run(measurements: Mapping[str, Measurement]) -> dict[str, Any]:
    """The machine, the sizes, all results, and notes."""
    machine = _machine()
    results: list[Mapping[str, Any]] = []
    notes: list[str] = []
    for name, measurement in measurements.items():
        with one_core() if measurement.one_core else nullcontext():
            found = measurement.measure(measurement.sizes, measurement.rounds, progress(name))
        results += [{"benchmark": name, **result.to_json()} for result in found.results]
        notes += [f"{name}: {note}" for note in found.notes]
    sizes = {name: asdict(measurement.sizes) for name, measurement in measurements.items()}
    return {"machine": machine, "sizes": sizes, "results": results, "notes": notes}


def _machine() -> dict[str, Any]:
    """What a number depends on beside our code; the load shows whether anything else was running."""
    return {
        "processor": processor(),
        "cores": len(usable_cores()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
        **versions(),
    }


def _flags() -> Iterator[inspect.Parameter]:
    texts = descriptions(Workload.__module__)
    defaults = {field.name: field.default for field in fields(Workload)}
    for setting in settings_of(Workload):
        default = defaults[setting.key]
        yield flag(setting, texts[f"Workload.{setting.key}"], None if default is None else str(default))


bench = with_flags(bench_command, _flags())
