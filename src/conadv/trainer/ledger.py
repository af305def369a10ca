"""The outcomes of steps: read from the device, checked and logged.

CPU      read before the update of the same step, since nothing has to be waited for
others   read one step late, before the next update: the host does not wait for the step that it has just started
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conadv.parallel.outcome import NotFiniteError, Outcome, Unread

from .build import Job, Policy
from .record import Sinks
from .undo import Undo


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    skipped: int = 0


@dataclass
class Step:
    """A step whose update was started, or is about to be."""

    number: int
    rate: float
    """The learning rate."""
    unread: Unread
    seconds: float = 0.0
    """Since the start of the run, at the end of the step."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What was measured of its staleness."""
    outcome: Outcome | None = None
    """None: not read yet."""


class Ledger:
    """The outcomes of steps, in their order.

    Args:
        job: the run.
        progress: how far it has come; steps that are left out are counted there.
        policy: what to do about numbers that are not finite.
        sinks: get the metrics of each step.
        undo: takes back updates of steps that are read late.
    """

    def __init__(self, job: Job, progress: Progress, policy: Policy, sinks: Sinks, undo: Undo) -> None:
        self._job, self._progress, self._policy, self._sinks, self._undo = job, progress, policy, sinks, undo
        self._open: Step | None = None
        self.stopped_by = 0
        """The signal that asked some rank to stop; 0: none did."""
        self.save_asked = False
        """Whether some rank asked for a checkpoint."""

    def read(self, step: Step) -> Outcome:
        """The outcome of a step, the same on all ranks, all of which ask; an error if the run cannot continue."""
        if step.outcome is None:
            step.outcome = step.unread.read()
            self.stopped_by = self.stopped_by or step.outcome.stop
            self.save_asked = self.save_asked or step.outcome.save
            self._job.member.check_weights(step.number, step.outcome)
            if step.outcome.culprits is not None:
                self._progress.skipped += 1
                self._check_finite(step, step.outcome)
        return step.outcome

    def open(self, step: Step) -> None:
        """Enter a step that is still to be logged."""
        assert self._open is None
        self._open = step

    def settle(self, evaluate: Callable[[], Mapping[str, float]] = dict) -> None:
        """Read and log the step that is open, if one is, with the metrics of an evaluation after it."""
        step, self._open = self._open, None
        if step is None:
            return
        is_late = step.outcome is None
        outcome = self.read(step)
        if is_late and outcome.culprits is not None:
            self._undo.undo_counts()
        metrics = {**self._metrics(step, outcome), **evaluate(), "seconds": step.seconds, **step.measured}
        self._sinks.log(step.number, metrics)

    def _metrics(self, step: Step, outcome: Outcome) -> dict[str, Any]:
        weight = self._job.adv_weight
        return {
            "epoch": (step.number + 1) / self._job.stream.steps_per_epoch,
            "lr": step.rate,
            "loss": (1 - weight) * outcome.clean_loss + weight * outcome.adv_loss,
            "clean_loss": outcome.clean_loss,
            "adv_loss": outcome.adv_loss,
            "skipped": outcome.culprits is not None,
        }

    def _check_finite(self, step: Step, outcome: Outcome) -> None:
        """End the run, unless a step whose numbers are not finite may be left out."""
        policy, told = self._policy, self._not_finite(step, outcome)
        if policy.nonfinite == "stop":
            self._job.member.drain()
            raise NotFiniteError(
                f"{told}: try a lower --optimizer.lr, a longer --schedule.warmup-epochs, or --nonfinite skip"
            )
        if self._progress.skipped > policy.skip_limit:
            self._job.member.drain()
            limit = policy.skip_limit
            raise NotFiniteError(f"{told}, after {limit} such steps were left out: try a lower --optimizer.lr")

    def _not_finite(self, step: Step, outcome: Outcome) -> str:
        """What happened where, in words."""
        epoch, batch = divmod(step.number, self._job.stream.steps_per_epoch)
        at = f"epoch {epoch}, batch {batch}, learning rate {step.rate:.4g}"
        return f"step {step.number}: {self._job.member.not_finite(outcome)} is not finite ({at})"
