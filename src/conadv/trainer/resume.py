"""Resuming: find and check a checkpoint, restore everything, and regenerate the twins in flight."""

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
from .ledger import Progress
from .state import check_tensors, largest_size, restore, stale_versions


@dataclass(frozen=True)
class Expected:
    """What a checkpoint of this run must match; others are skipped."""

    model: nn.Module
    optimizer: Optimizer
    """An optimizer of the run's kind with a filled state, for its names, shapes and dtypes."""
    delay: int
    averaged: bool
    """Whether the run keeps a moving average of the weights."""
    recipe: dict[str, Any]
    """The values that decide the numbers of the run, by dotted key."""
    added: dict[str, Any]
    """The default of each field that a checkpoint of an older version may lack, by dotted key."""

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise a ValueError if a checkpoint is of another run; the caller puts its name before the message."""
        theirs = {**self.added, **checkpoint.about["recipe"]}
        other = [key for key, value in self.recipe.items() if theirs.get(key) != value]
        if other:
            raise ValueError(f"is of another run: its recipe differs in {', '.join(other)}")
        check_tensors(checkpoint.tensors, self.model, self.optimizer, self.delay, self.averaged)


def find_checkpoint(folder: Path, expected: Expected, tell: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint of a run; None if it has not written any."""
    if not checkpoints(folder / "checkpoints"):
        return None
    largest = largest_size(expected.model, expected.optimizer, expected.delay, expected.averaged)
    return newest_whole(folder / "checkpoints", tell, expected.check, largest)


def restore_job(job: Job, checkpoint: Checkpoint) -> Progress:
    """Restore a job from a checkpoint."""
    about = checkpoint.about
    step = about["step"]
    job.method.resume(step)
    _prime(job, checkpoint, step)
    restore(checkpoint.tensors, job.task.model, job.optimizer, job.stale, job.ema)
    return Progress(step, about["position"]["seconds"], about["position"]["skipped"])


def _prime(job: Job, checkpoint: Checkpoint, step: int) -> None:
    """Regenerate the twins in flight, each with the weights of the step in which it was generated."""
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
