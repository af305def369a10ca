"""A few lines about a run that are printed before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from conadv.core.roles import Role
from conadv.core.splitbn import plain_state_dict
from conadv.readable import readable

from .build import Job


def preview(values: Mapping[str, Any], job: Job, start: int) -> Iterator[str]:
    """Yield lines about the model, the data, the method and the ranks.

    Args:
        values: the fields of the recipe by dotted name, with "auto" resolved.
        job: the run.
        start: the step that it starts at.
    """
    task, stream, world = job.task, job.stream, job.world
    channels, height, width = task.augment.shape(task.data.train)
    plain = plain_state_dict(task.model)
    parameters = sum(parameter.numel() for name, parameter in task.model.named_parameters() if name in plain)
    twins = f", epsilon {readable('epsilon', values['attack.epsilon'])}" if Role.ADV in job.layout.duties else ""
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


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} with 1 thread" if threads == 1 else f"{device.type} with {threads} threads"
