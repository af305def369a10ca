"""`conadv bench`: a flag for each size, the benchmarks by name, and what is printed."""

from __future__ import annotations

import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, NamedTuple

import torch
from cyclopts import App, Parameter

from conadv.flags import flag, with_flags
from conadv.machine import processor, usable_cores
from conadv.setting import descriptions, did_you_mean, settings_of
from conadv.study.plan.table import columns
from conadv.task.models import check_output
from conadv.trainer.folder import versions

from . import layout, step
from .alternate import Tell, progress
from .ranks import one_core
from .result import Findings
from .workload import Workload

_WHICH = """What to measure; none: both, one after the other.
step: each method against vanilla, vanilla against the plainest loop, and the passes that conadv plan reads.
layout: roles on ranks of their own against vanilla on as many."""
_HEADER = ("benchmark", "ratio of times", "median", "10 %", "90 %", "median within", "n", "by work", "by flops")
# Comparisons that need other libraries, and measurements for developers.
_MOST_ROUNDS = 10**6
_SCRIPTS = ("attack", "lars", "data", "reduction", "composed", "step_parts", "stragglers", "team")


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
    if rounds is not None and not 1 <= rounds <= _MOST_ROUNDS:
        raise ValueError(f"--rounds {rounds}: take from 1 to {_MOST_ROUNDS}")
    check_output(workload.build(), workload.shape, workload.classes)
    report(known if which is None else {which: known[which]}, json_)


def report(measurements: Mapping[str, Measurement], as_json: bool) -> None:
    """Run benchmarks and print what they found: a table, or one JSON object."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        document = _run(measurements)
    print(json.dumps(document, default=str) if as_json else render(document))


def run_workload(name: str, measurement: Measurement, text: str | None) -> None:
    """Run a script that measures a workload: flags for its sizes, and `text` as its help."""
    sizes: Workload = measurement.sizes

    def main(
        *,
        rounds: int = measurement.rounds,
        model: str = sizes.model,
        width: int | None = None,
        chunk_size: int = sizes.chunk_size,
        image_size: int = sizes.image_size,
        json: bool = False,
    ) -> None:
        chosen = replace(sizes, model=model, width=width, chunk_size=chunk_size, image_size=image_size)
        report({name: measurement._replace(sizes=chosen, rounds=rounds)}, json)

    main.__doc__ = text
    run_script(main)


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
    """What a number depends on besides our code; the load shows whether anything else was running."""
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
    ratios = [entry for entry in document["results"] if "ratio" in entry]
    times = [entry for entry in document["results"] if "ratio" not in entry]
    given = "\n".join(_listed(facts) for facts in (document["machine"], *document["sizes"].values()))
    parts = [given, _ratios(ratios), _times(times), "\n".join(document["notes"])]
    return "\n\n".join(part for part in parts if part)


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def _ratios(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    legend = "10 %, 90 %: percentiles of the rounds; median within: 95 % confidence, less below 6 rounds"
    return columns([(*_HEADER, "goal", ""), *map(_ratio, entries)]) + f"\n{legend}"


def _ratio(entry: Mapping[str, Any]) -> tuple[str, ...]:
    name = entry["name"] + (" (composed)" if entry.get("composed") and not entry["name"].endswith("composed") else "")
    spread = (f"{entry[key]:.3f}" for key in ("ratio", "low", "high"))
    sure = f"{entry['median_low']:.3f} – {entry['median_high']:.3f}"
    others = (f"{entry[key]:.3f}" if key in entry else "-" for key in ("work_ratio", "flop_ratio"))
    met = {True: "met", False: "missed", None: ""}[entry.get("met")]
    return entry["benchmark"], name, *spread, sure, str(entry["n"]), *others, entry.get("goal", ""), met


def _times(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    rows = [("benchmark", "time", "ms", "10 %", "90 %", "n")]
    for entry in entries:
        a_piece = " per image" if "seconds_per_image" in entry else ""
        value = entry.get("seconds_per_image", entry.get("seconds"))
        figures = (f"{1e3 * figure:.4g}" for figure in (value, entry["low"], entry["high"]))
        rows.append((entry["benchmark"], entry["name"] + a_piece, *figures, str(entry["n"])))
    return columns(rows)


# Flags


def _flags() -> Iterator[inspect.Parameter]:
    texts = descriptions(Workload.__module__)
    defaults = {field.name: field.default for field in fields(Workload)}
    for setting in settings_of(Workload):
        default = defaults[setting.key]
        yield flag(setting, texts[f"Workload.{setting.key}"], None if default is None else str(default))


bench = with_flags(bench_command, _flags())
