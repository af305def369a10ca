"""A few lines about a run that are printed before its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from conadv.core.roles import Role
from conadv.core.seeds import untouched_randomness
from conadv.core.splitbn import plain_state_dict
from conadv.readable import duration, readable

from .build import Job


def preview(values: Mapping[str, Any], passes: Mapping[Role, int], job: Job, start: int) -> Iterator[str]:
    """Yield lines about the model, the data, the method, the ranks and the estimated time.

    Args:
        values: the fields of the recipe by dotted name, with "auto" resolved.
        passes: the cost of each duty of the method, in passes over the batch.
        job: the run.
        start: the step that it starts at.
    """
    task, stream, world = job.task, job.stream, job.world
    channels, height, width = task.augment.shape(task.data.train)
    plain = plain_state_dict(task.model)
    parameters = sum(parameter.numel() for name, parameter in task.model.named_parameters() if name in plain)
    twins = f", epsilon {readable('epsilon', values['attack.epsilon'])}" if Role.ADV in passes else ""
    delay = f", delay {values['delay']}" if values["delay"] else ""
    steps = f"steps {start + 1:,} to {job.stop:,}" if start else f"{job.stop:,} steps"
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    yield f"model   {values['model']}, {parameters:,} parameters"
    yield (
        f"data    {len(task.data.train):,} images of {height} × {width} × {channels}, "
        f"{len(task.data.train.classes):,} classes; {len(task.data.test):,} to test"
    )
    yield f"method  {values['method']}{twins}{delay}; {values['optimizer.name']}, peak rate {values['optimizer.lr']:g}"
    yield (
        f"run     {steps} of {stream.batch_size:,} images on {ranks} ({job.layout}), {_device(task.device)}, "
        f"chunks of {stream.chunk_size}"
    )
    yield f"time    about {duration((job.stop - start) * _step_seconds(values, passes, job))} without evaluations"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} with 1 thread" if threads == 1 else f"{device.type} with {threads} threads"


def _step_seconds(values: Mapping[str, Any], passes: Mapping[Role, int], job: Job) -> float:
    """Estimate the seconds of a step of the busiest rank, roughly, from a forward pass over one chunk."""
    share = {duty: cost if duty == Role.CLEAN else cost * values["twin_share"] for duty, cost in passes.items()}
    busiest = max(sum(share[duty] for duty in share if duty in role) for role in job.layout.roles)
    if values["delay"] == 0 and not any(Role.ADV | Role.ATTACK in role for role in job.layout.roles):
        busiest = max(busiest, share.get(Role.ADV, 0) + share.get(Role.ATTACK, 0))  # adv waits for attack
    assert job.place.chunks is not None
    return busiest * job.place.chunks * _pass_seconds(values, job)


def _pass_seconds(values: Mapping[str, Any], job: Job) -> float:
    """Measure a forward pass over one chunk, in seconds; it changes no state of the model."""
    task = job.task
    dtype = next(task.model.parameters()).dtype
    shape = (int(values["chunk_size"]), *task.augment.shape(task.data.train))
    images = torch.full(shape, 0.5, device=task.device, dtype=dtype)
    half = torch.autocast(task.device.type, torch.bfloat16) if values["precision"] == "bfloat16" else nullcontext()
    training = task.model.training
    task.model.eval()
    try:
        with torch.no_grad(), half, untouched_randomness(task.device, 0):
            task.model(images)  # the first pass also allocates memory
            times: list[float] = []
            while len(times) < 5 and sum(times) < 1:  # the fastest counts: other processes may slow some of them down
                began = time.perf_counter()
                float(task.model(images).sum())  # waits for the device
                times.append(time.perf_counter() - began)
            return min(times)
    finally:
        task.model.train(training)
