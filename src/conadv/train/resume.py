"""Going on from a checkpoint: everything as it was, and the twins in flight made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .build import Job
from .checkpoint import Checkpoint, checkpoints, newest_whole
from .loop import Progress
from .state import StaleWeights, restore, stale_versions


def find_checkpoint(folder: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None where a run was ended before it wrote one."""
    if not checkpoints(folder / "checkpoints"):
        tell(f"{folder} has no checkpoint yet: starting from its first step")
        return None
    return newest_whole(folder / "checkpoints", tell)


def go_on(job: Job, stale: StaleWeights, checkpoint: Checkpoint) -> Progress:
    """Put a job into the state of a checkpoint."""
    about = checkpoint.about
    step = about["step"]
    job.method.resume(step)
    _prime(job, checkpoint, step)
    restore(checkpoint.tensors, job.task.model, job.optimizer, stale)
    return Progress(step, about["position"]["seconds"], about["position"]["skipped"])


def _prime(job: Job, checkpoint: Checkpoint, step: int) -> None:
    """Make the twins in flight again, each with the weights of the step that it was made in."""
    if job.layout.maker() not in job.place.role:
        return
    versions = stale_versions(checkpoint.tensors)
    for number, version in zip(job.method.in_flight(step), versions, strict=True):
        if 0 <= number < job.stop:
            job.task.model.load_state_dict(version)
            batch = next(job.batches(number, number + 1))
            assert batch is not None
            job.method.prime(batch, number)
