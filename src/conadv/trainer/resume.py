"""Going on from a checkpoint: found, checked, everything as it was, and the twins in flight made again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .build import Job
from .checkpoint import Checkpoint, checkpoints, newest_whole
from .loop import Progress
from .state import check_tensors, largest_size, restore, stale_versions


@dataclass(frozen=True)
class Expected:
    """What a run knows of its own checkpoints; anything else is passed over."""

    model: nn.Module
    optimizer: Optimizer
    """One of the run's kind whose state is filled, for its names, shapes and dtypes."""
    delay: int
    averaged: bool
    """Whether the run keeps a moving average of the weights."""
    recipe: dict[str, Any]
    """The values that decide the numbers of the run, by dotted key."""
    added: dict[str, Any]
    """The default of each field that a checkpoint of an older version may lack, by dotted key."""

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise a ValueError, which goes on after the name of the checkpoint, if it is of another run."""
        theirs = {**self.added, **checkpoint.about["recipe"]}
        other = [key for key, value in self.recipe.items() if theirs.get(key) != value]
        if other:
            raise ValueError(f"is of another run: its recipe differs in {', '.join(other)}")
        check_tensors(checkpoint.tensors, self.model, self.optimizer, self.delay, self.averaged)


def find_checkpoint(folder: Path, expected: Expected, tell: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None where a run was ended before it wrote one."""
    if not checkpoints(folder / "checkpoints"):
        return None
    largest = largest_size(expected.model, expected.optimizer, expected.delay, expected.averaged)
    return newest_whole(folder / "checkpoints", tell, expected.check, largest)


def restore_job(job: Job, checkpoint: Checkpoint) -> Progress:
    """Put a job into the state of a checkpoint."""
    about = checkpoint.about
    step = about["step"]
    job.method.resume(step)
    _prime(job, checkpoint, step)
    restore(checkpoint.tensors, job.task.model, job.optimizer, job.stale, job.ema)
    return Progress(step, about["position"]["seconds"], about["position"]["skipped"])


def _prime(job: Job, checkpoint: Checkpoint, step: int) -> None:
    """Make the twins in flight again, each with the weights of the step that it was made in."""
    in_flight = job.method.in_flight(step)
    if job.layout.maker() not in job.place.role or not in_flight:
        return
    for number, version in zip(in_flight, stale_versions(checkpoint.tensors), strict=True):
        if 0 <= number < job.stop:
            job.task.model.load_state_dict(version)
            with closing(job.batches(number, number + 1)) as batches:
                batch = next(batches)
                assert batch is not None
                job.method.prime(batch, number)
