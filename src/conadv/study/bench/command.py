"""`conadv bench`: its flags, the benchmarks by name, and the printed tables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from json import dumps
from typing import Annotated, Any, NamedTuple

import torch
from cyclopts import Parameter

from conadv.flags import Json, flags_of, parse_flags, with_flags
from conadv.machine import processor, usable_cores
from conadv.setting import did_you_mean
from conadv.task.models import check_output
from conadv.trainer.folder import versions

from . import layout, step
from .alternate import Tell, progress
from .ranks import one_core
from .result import Findings, columns
from .workload import Workload

_WHICH = """What to measure. none: both, one after the other.
step: each method against vanilla, vanilla against a plain PyTorch loop, and the times of passes.
layout: roles on separate ranks against vanilla on as many ranks."""
_RATIOS = (
    *("benchmark", "ratio of times", "median", "10 %", "90 %", "median within", "n", "by work", "by flops"),
    *("goal", ""),
)
_LEGEND = "10 %, 90 %: percentiles of the rounds; median within: 95 % confidence, less below 6 rounds"
_TIMES = ("benchmark", "time", "ms", "10 %", "90 %", "n")
_MOST_ROUNDS = 10**6
# Comparisons that need other libraries, and measurements for developers.
_SCRIPTS = ("attack", "lars", "data", "reduction", "composed", "step_parts", "stragglers", "team")


class Measurement(NamedTuple):
    """One benchmark, ready to run."""

    measure: Callable[[Any, int, Tell], Findings]
    sizes: Any
    """A dataclass, which is printed with the results."""
    rounds: int
    one_core: bool = True
    """Whether it runs entirely in this process."""


def bench_command(
    which: Annotated[str | None, Parameter(help=_WHICH)] = None,
    /,
    *,
    rounds: Annotated[int | None, Parameter(help="How often each candidate is timed. none: about a minute.")] = None,
    json: Json = False,
    **sizes: Any,
) -> None:
    """Time candidates alternately, on one core each, and print the ratios of their times with percentiles."""
    workload = Workload(**parse_flags(Workload, sizes))
    known = {
        "step": Measurement(step.measure, workload, rounds or step.ROUNDS),
        "layout": Measurement(layout.measure, workload, rounds or layout.ROUNDS, one_core=False),
    }
    if which in _SCRIPTS:
        raise ValueError(f"the benchmark {which} is a script of the repository: run python benchmarks/{which}.py")
    if which is not None and which not in known:
        raise ValueError(f"unknown benchmark {which!r}: choose step or layout" + did_you_mean(which, known))
    if rounds is not None and not 1 <= rounds <= _MOST_ROUNDS:
        raise ValueError(f"--rounds is {rounds} but must be from 1 to {_MOST_ROUNDS}")
    check_output(workload.build(), workload.shape, workload.classes)
    report(known if which is None else {which: known[which]}, json)


def report(measurements: Mapping[str, Measurement], as_json: bool) -> None:
    """Run benchmarks and print what they found: a table, or one JSON object."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        document = _run(measurements)
    print(dumps(document, default=str) if as_json else render(document))


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
    """What the times depend on besides our code; the load shows whether anything else was running."""
    return {
        "processor": processor(),
        "cores": len(usable_cores()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
        **versions(),
    }


# What is printed


def render(document: Mapping[str, Any]) -> str:
    """The machine, the sizes, ratios, times and notes."""
    given = "\n".join(
        ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        for facts in (document["machine"], *document["sizes"].values())
    )
    ratios = [_ratio(entry) for entry in document["results"] if "ratio" in entry]
    times = [_time(entry) for entry in document["results"] if "ratio" not in entry]
    parts = [given, *([columns([_RATIOS, *ratios]) + f"\n{_LEGEND}"] if ratios else [])]
    parts += [*([columns([_TIMES, *times])] if times else []), "\n".join(document["notes"])]
    return "\n\n".join(part for part in parts if part)


def _ratio(entry: Mapping[str, Any]) -> tuple[str, ...]:
    name = entry["name"] + (" (composed)" if entry.get("composed") and not entry["name"].endswith("composed") else "")
    spread = (f"{entry[key]:.3f}" for key in ("ratio", "low", "high"))
    sure = f"{entry['median_low']:.3f} – {entry['median_high']:.3f}"
    others = (f"{entry[key]:.3f}" if key in entry else "-" for key in ("work_ratio", "flop_ratio"))
    met = {True: "met", False: "missed", None: ""}[entry.get("met")]
    return entry["benchmark"], name, *spread, sure, str(entry["n"]), *others, entry.get("goal", ""), met


def _time(entry: Mapping[str, Any]) -> tuple[str, ...]:
    per_image = "seconds_per_image" in entry
    keys = ("seconds_per_image" if per_image else "seconds", "low", "high")
    numbers = (f"{1e3 * entry[key]:.4g}" for key in keys)
    return entry["benchmark"], entry["name"] + " per image" * per_image, *numbers, str(entry["n"])


bench = with_flags(bench_command, flags_of(Workload, {"model": "What is computed"}))
