"""Read, check and log the outcomes of steps.

on the CPU   the outcome is read before the update of the same step
on a GPU     it is read before the update of the next step, so that the host does not wait for the device
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conadv.ranks.outcome import NotFiniteError, Outcome, Unread

from .build import Job, Policy
from .metrics import Sinks
from .undo import Undo


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    skipped: int = 0


@dataclass
class TakenStep:
    """One training step."""

    number: int
    rate: float
    """The learning rate."""
    unread: Unread
    outcome: Outcome | None = None
    """None: not read yet."""
    is_late: bool = False
    """Whether the outcome is read after the update."""
    seconds: float = 0.0
    """Time since the start of the run, at the end of the step."""


class Ledger:
    """Reads the outcomes of steps in their order, checks them and logs their metrics.

    Args:
        job: the run.
        progress: where skipped steps are counted.
        policy: what to do about numbers that are not finite.
        sinks: get the metrics of each step.
        undo: undoes updates of steps whose outcome is read late.
    """

    def __init__(self, job: Job, progress: Progress, policy: Policy, sinks: Sinks, undo: Undo) -> None:
        self._job, self._progress, self._policy, self._sinks, self._undo = job, progress, policy, sinks, undo
        self._last: TakenStep | None = None  # not logged yet
        self.stop_signal = 0
        """The signal that asked some rank to stop; 0: none did."""
        self.save_requested = False
        """Whether some rank has requested a checkpoint."""

    def add(self, step: TakenStep) -> None:
        """Add a step before its update: log the last one, and read the outcome of this one unless it is read late."""
        self.log()
        self._last = step
        step.is_late = self._policy.late and (self._undo.is_ready or self._policy.nonfinite == "stop")
        if not step.is_late:
            self.read(step)

    def read(self, step: TakenStep) -> Outcome:
        """Return the outcome of a step, the same on all ranks; every rank must call this.

        Raises:
            NotFiniteError: a number is not finite, and the step cannot be skipped.
            DriftError: the ranks have different weights.
        """
        if step.outcome is None:
            step.outcome = step.unread.read()
            self.stop_signal = self.stop_signal or step.outcome.stop
            self.save_requested = self.save_requested or step.outcome.save
            self._job.member.check_weights(step.number, step.outcome)
            if step.outcome.culprits is not None:
                self._progress.skipped += 1
                self._check_may_skip(step, step.outcome)
                if step.is_late:
                    self._undo.undo_counts()
        return step.outcome

    def log(self, evaluation: Mapping[str, float] | None = None) -> None:
        """Log the last step unless that was done already, with the metrics of an evaluation after it."""
        step, self._last = self._last, None
        if step is not None:
            outcome = self.read(step)
            metrics = {**self._metrics(step, outcome), **(evaluation or {}), "seconds": step.seconds}
            self._sinks.log(step.number, metrics)

    def _metrics(self, step: TakenStep, outcome: Outcome) -> dict[str, Any]:
        weight = self._job.protocol.weight(step.number)
        return {
            "epoch": (step.number + 1) / self._job.stream.steps_per_epoch,
            "lr": step.rate,
            "loss": (1 - weight) * outcome.clean_loss + weight * outcome.adv_loss,
            "clean_loss": outcome.clean_loss,
            "adv_loss": outcome.adv_loss,
            "skipped": outcome.culprits is not None,
        }

    def _check_may_skip(self, step: TakenStep, outcome: Outcome) -> None:
        """Raise a NotFiniteError, unless a step with numbers that are not finite may be skipped."""
        epoch, batch = divmod(step.number, self._job.stream.steps_per_epoch)
        at = f"epoch {epoch}, batch {batch}, learning rate {step.rate:.4g}"
        what = f"step {step.number}: {self._job.member.not_finite(outcome)} is not finite ({at})"
        limit = self._policy.skip_limit
        if self._policy.nonfinite == "stop":
            advice = ": try a lower --optimizer.lr, a longer --schedule.warmup-epochs, or --nonfinite skip"
        elif self._progress.skipped > limit:
            advice = f", after {limit} such steps were left out: try a lower --optimizer.lr"
        else:
            return
        self._job.member.drain()
        raise NotFiniteError(what + advice)
