"""Resume a run: find and check a checkpoint, restore the state, and regenerate the twins in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .build import Job
from .checkpoint import Checkpoint, checkpoints, newest_whole
from .ledger import Progress
from .state import check_tensors, largest_size, restore, stale_versions


@dataclass(frozen=True)
class Expected:
    """What a checkpoint must match to be of this run."""

    tensors: dict[str, Tensor]
    """Tensors of the right names, shapes and dtypes (`expected_tensors`)."""
    recipe: dict[str, Any]
    """The fields of the recipe that change results, by dotted key."""
    added: dict[str, Any]
    """The defaults, which fields stand for that were added after a checkpoint was written, by dotted key."""

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise a ValueError if a checkpoint is of another run; its message follows the name of the checkpoint."""
        theirs = {**self.added, **checkpoint.about["recipe"]}
        other = [key for key, value in self.recipe.items() if theirs.get(key) != value]
        if other:
            raise ValueError(f"is of another run: its recipe differs in {', '.join(other)}")
        check_tensors(checkpoint.tensors, self.tensors)


def find_checkpoint(folder: Path, expected: Expected, tell: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run; None if there is none yet."""
    if not checkpoints(folder / "checkpoints"):
        return None
    return newest_whole(folder / "checkpoints", tell, expected.check, largest_size(expected.tensors))


def restore_job(job: Job, checkpoint: Checkpoint) -> Progress:
    """Restore a job from a checkpoint; every rank must call it."""
    about = checkpoint.about
    step = about["step"]
    job.member.resume(step)
    _prime(job, checkpoint, step)
    restore(checkpoint.tensors, job.task.model, job.optimizer, job.stale, job.ema)
    return Progress(step, about["position"]["seconds"], about["position"]["skipped"])


def _prime(job: Job, checkpoint: Checkpoint, step: int) -> None:
    """Regenerate the twins in flight, each with the weights of the step in which it was generated."""
    twins = job.member.twins
    if twins is None or job.layout.maker() not in job.place.role:
        return
    in_flight = twins.in_flight(step)
    if not in_flight:
        return
    for number, version in zip(in_flight, stale_versions(checkpoint.tensors), strict=True):
        if 0 <= number < job.stop:
            job.task.model.load_state_dict(version)
            with closing(job.batches(number, number + 1)) as batches:
                batch = next(batches)
                assert batch is not None
                twins.prime(batch, number)
