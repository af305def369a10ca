"""What a step costs: each method against vanilla, vanilla through this library against the plainest loop, the passes.

All candidates work on one chunk of the same images, with the same optimizer. Its learning rate is 0, so that the
weights stay the same and every round does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.flop_counter import FlopCounterMode

from conadv.core.batch import Chunk
from conadv.core.catalog import METHODS
from conadv.core.splitbn import update_running_stats
from conadv.optim.groups import parameter_groups
from conadv.optim.lars import Lars
from conadv.parallel.collectives import World, own_device
from conadv.parallel.gradients import Exchange
from conadv.parallel.layout import Layout

from .alternate import Laps, Tell, alternate
from .result import Findings, Goal, Result, Spread, work_ratio, work_time
from .workload import Workload

ROUNDS = 10
_AS_FAST_AS_PLAIN = Goal("≤", 1.02)
Step = Callable[[], object]


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Ratios of steps, and seconds of the passes that the planner builds steps from."""
    # The small difference to the plain loop needs more rounds, with nothing else between its candidates.
    overhead = alternate(plainest(workload), 2 * rounds, tell=tell)
    methods = {name: method_step(workload, name) for name in METHODS}
    flops = {name: _count_flops(step) for name, step in methods.items()}
    laps = alternate({**methods, **_passes(workload), "update": _update(workload)}, rounds, tell=tell)
    others = [method for method in METHODS if method != "vanilla"]
    return Findings(
        [
            *(work_ratio(overhead, name, "plain", _AS_FAST_AS_PLAIN) for name in ("vanilla", "train")),
            *(work_ratio(laps, name, "vanilla", flops=flops[name] / flops["vanilla"]) for name in others),
            *_pass_times(laps, workload.chunk_size),
        ],
        notes=[
            "plain: the plainest PyTorch loop; vanilla: the same through this library; train: as conadv train does it",
            "by the processor time of the process; wall times are in the JSON",
        ],
    )


def plainest(workload: Workload) -> dict[str, Step]:
    """Vanilla as `conadv train` takes it, through this library alone, and in the plainest loop."""
    plain = plain_step(workload.build(), workload.pixels())
    return {"train": _train_step(workload), "plain": plain, "vanilla": method_step(workload, "vanilla")}


def plain_step(model: nn.Module, batch: Chunk) -> Step:
    """The loop without this library."""
    optimizer = sgd(model)
    images, labels = batch

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def method_step(workload: Workload, name: str) -> Step:
    """The loop with it."""
    model = workload.build(name)
    method, optimizer = workload.method(name, model), sgd(model)
    pairs = iter(method.feed(repeat(workload.pixels())))

    def step() -> None:
        now, ahead = next(pairs)
        optimizer.zero_grad()
        method(now, ahead)
        optimizer.step()

    return step


def _train_step(workload: Workload) -> Step:
    """A step of vanilla as `conadv train` takes it, with its checks and its exchange."""
    model = workload.build("vanilla")
    place = Layout.fit(None, METHODS["vanilla"].duties, 1).place(0, 1)
    method, optimizer = workload.method("vanilla", model, place=place), sgd(model)
    exchange = Exchange(model, World(0, 1, own_device()), place.share)
    batch = workload.pixels()

    def step() -> None:
        exchange.zero_grad()
        exchange.finish(method(batch))
        update_running_stats(model)
        optimizer.step()

    return step


def sgd(model: nn.Module) -> Optimizer:
    """An optimizer that leaves the weights as they are."""
    return SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)


def _passes(workload: Workload) -> dict[str, Step]:
    """Forward passes, followed by more and more of the backward pass; the differences are its parts."""
    model = workload.build()
    images, labels = workload.pixels()
    watched = images.clone().requires_grad_()
    parameters = list(model.parameters())

    def loss(images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    return {
        "forward": lambda: loss(images),
        "to pixels": lambda: torch.autograd.grad(loss(watched), watched),
        "to weights": lambda: torch.autograd.grad(loss(images), parameters),
        "to both": lambda: torch.autograd.grad(loss(watched), [watched, *parameters]),
    }


def _update(workload: Workload) -> Step:
    model = workload.build()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return Lars(parameter_groups(model, 5e-4), lr=0.0).step


def _count_flops(step: Step) -> int:
    """Operations of convolutions and matrix products, which are nearly all."""
    step()  # the first one may make twins for the next
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _pass_times(laps: Laps, images: int) -> list[Result]:
    """Times by the names of `conadv plan`; at the chunk size to plan for, a pass has no overhead left."""

    def seconds(name: str, less: str | None = None, share: int = images) -> Spread:
        times = list(map(work_time, laps[name]))
        bases = map(work_time, laps[less]) if less else repeat(0.0, len(times))
        return Spread.of([(time - base) / share for time, base in zip(times, bases, strict=True)])

    to_pixels = seconds("to both", "to weights")
    passes = {
        "forward": seconds("forward"),
        "input_backward": seconds("to pixels", "forward"),
        "weight_backward": seconds("to both", "to pixels"),
        # The difference of two noisy times may be too small to tell from 0.
        "pixel_backward": replace(to_pixels, median=max(to_pixels.median, 0.0)),
    }
    return [
        *(Result(name, spread, unit="seconds_per_image") for name, spread in passes.items()),
        Result("update", seconds("update", share=1), unit="seconds"),
        *(Result(f"step of {name}", seconds(name, share=1), unit="seconds") for name in METHODS),
    ]
