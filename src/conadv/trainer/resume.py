"""Resume a run: find and check a checkpoint, restore the state, and evaluate again what the last step left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from conadv.core.algorithm import ConAdv

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
    step = checkpoint.about["step"]
    versions = stale_versions(checkpoint.tensors)
    if job.method.delay and not isinstance(job.method, ConAdv):
        _prime(job, versions, step)
    restore(checkpoint.tensors, job.task.model, job.optimizer, job.stale)
    job.member.resume(step, versions)
    return Progress(step, checkpoint.about["position"]["seconds"])


def _prime(job: Job, versions: list[dict[str, Tensor]], step: int) -> None:
    """Evaluate again what the steps before left behind, each with its weights and its batch."""
    for number, version in zip(range(step - len(versions), step), versions, strict=True):
        if number >= 0:
            job.task.model.load_state_dict(version)
            with closing(job.batches(number, number + 1)) as batches:
                job.member.prime(next(batches), number)
