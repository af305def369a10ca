"""`conadv bench`: its flags, the benchmarks by name, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from cyclopts import Parameter

from conadv.study import bench_data
from conadv.task.models import check_output

from . import attack, lars, layout, step
from .alternate import Tell
from .machine import describe, one_core
from .progress import progress
from .result import Findings
from .table import render
from .workload import Workload

Benchmark = Literal["step", "attack", "lars", "layout", "data"]
_WHICH = """What to measure; none: all, one after the other.
step: each method against vanilla, vanilla against the plainest loop, and the passes that conadv plan reads.
attack: one step of PGD against foolbox, and DisAdv against a loop put together from foolbox.
lars: an update against torch.optim.SGD and pytorch_optimizer's LARS.
layout: roles on ranks of their own against vanilla on as many.
data: from disk to batch, against a plain PyTorch loop and webdataset."""


class _Measurement(NamedTuple):
    measure: Callable[[Any, int, Tell], Findings]
    sizes: Workload | bench_data.Reading
    rounds: int
    """How many take about a minute."""
    one_core: bool = True
    """Whether all of it runs in this process."""


def bench(
    which: Annotated[Benchmark | None, Parameter(help=_WHICH)] = None,
    /,
    *,
    rounds: Annotated[int | None, Parameter(help="How often each candidate is timed; none: about a minute.")] = None,
    model: Annotated[str | None, Parameter(help="A network; none: resnet20, and resnet50 for lars.")] = None,
    width: Annotated[int | None, Parameter(help="Channels of its first stage; none: its own default.")] = None,
    chunk_size: Annotated[int, Parameter(help="Images that a rank learns from in a step; of data, a batch.")] = 64,
    image_size: Annotated[int | None, Parameter(help="Their height and width; none: 32, and 224 for data.")] = None,
    path: Annotated[Path | None, Parameter(help="Where data lies; none: JPEGs made for the occasion.")] = None,
    images: Annotated[int, Parameter(help="How many of them data reads in a round.")] = bench_data.Reading.images,
    json_: Annotated[bool, Parameter(name="--json", help="Print one JSON object.", negative="")] = False,
) -> None:
    """Time candidates in turn, on one core each, and say by which ratio they differ, with the spread."""
    names: tuple[Benchmark, ...] = get_args(Benchmark) if which is None else (which,)
    if rounds is not None and rounds < 1:
        raise ValueError(f"--rounds {rounds}: take at least 1")
    sizes = _Sizes(model, width, chunk_size, image_size, path, images)
    measurements = {name: _measurement(name, sizes) for name in names}  # all mistakes before the first minute
    with redirect_stdout(sys.stderr) if json_ else nullcontext():
        document = _run(measurements, rounds)
    print(json.dumps(document, default=str) if json_ else render(document))


class _Sizes(NamedTuple):
    """What was asked for; None: what suits the benchmark."""

    model: str | None
    width: int | None
    chunk_size: int
    image_size: int | None
    path: Path | None
    images: int

    def workload(self, model: str = "resnet20", classes: int = 10) -> Workload:
        size = 32 if self.image_size is None else self.image_size
        workload = Workload(self.model or model, self.width, self.chunk_size, size, classes)
        check_output(workload.build(), workload.shape, workload.classes)
        return workload

    def reading(self) -> bench_data.Reading:
        size = 224 if self.image_size is None else self.image_size
        return bench_data.Reading(self.path, self.images, size, self.chunk_size)


def _measurement(name: Benchmark, sizes: _Sizes) -> _Measurement:
    match name:
        case "step":
            return _Measurement(step.measure, sizes.workload(), step.ROUNDS)
        case "attack":
            return _Measurement(attack.measure, sizes.workload(), attack.ROUNDS)
        case "lars":
            return _Measurement(lars.measure, sizes.workload("resnet50", classes=1000), lars.ROUNDS)
        case "layout":
            return _Measurement(layout.measure, sizes.workload(), layout.ROUNDS, one_core=False)
        case "data":
            return _Measurement(bench_data.measure, sizes.reading(), bench_data.ROUNDS, one_core=False)


def _run(measurements: Mapping[Benchmark, _Measurement], rounds: int | None) -> dict[str, Any]:
    """What `--json` prints: the machine, the sizes, all results, where the time of a step goes, and heartbeats."""
    machine = describe()
    results: list[Mapping[str, Any]] = []
    profile: list[Mapping[str, Any]] = []
    heartbeats: list[str] = []
    for name, measurement in measurements.items():
        with one_core() if measurement.one_core else nullcontext():
            found = measurement.measure(measurement.sizes, rounds or measurement.rounds, progress(name))
        results += [{"benchmark": name, **result.to_json()} for result in found.results]
        profile += [{"benchmark": name, **row} for row in found.profile]
        heartbeats += [f"{name}: {note}" for note in found.heartbeats]
    sizes = {name: asdict(measurement.sizes) for name, measurement in measurements.items()}
    return {"machine": machine, "sizes": sizes, "results": results, "profile": profile, "heartbeats": heartbeats}
