"""The time of a step: each method against vanilla, vanilla against a plain PyTorch loop, and each pass.

All candidates process the same chunk of images, with the same optimizer. Its learning rate is 0, so that the weights
stay the same and every round does the same work.
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
from conadv.core.batchnorm.splitbn import update_running_stats
from conadv.core.catalog import METHODS
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
    """Ratios of step times, and the times of passes."""
    # The difference to the plain loop is small, so it gets more rounds, without other candidates in between.
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
    """Vanilla as in `conadv train`, as in a user's loop with this library, and in a plain PyTorch loop."""
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
    """The loop with this library."""
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
    """A step of vanilla as in `conadv train`, with its checks and its exchange."""
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
    """The forward pass with more and more parts of the backward pass; their differences are the times of the parts."""
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
    """FLOPs of convolutions and matrix products, which are nearly all."""
    step()  # the first one may make twins for the next
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _pass_times(laps: Laps, images: int) -> list[Result]:
    """Times of passes. They include the overhead of a pass at this chunk size."""

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
