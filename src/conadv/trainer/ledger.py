"""Read, check and log the outcomes of steps: on a GPU one step late, so that the host does not wait for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conadv.ranks.member import Outcome, StepError, Unread

from .build import Job
from .metrics import Sinks


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0


@dataclass
class TakenStep:
    """One training step, whose outcome may not have been read yet."""

    number: int
    rate: float
    """The learning rate."""
    unread: Unread
    seconds: float
    """Time since the start of the run, at the end of the step."""
    pool: Mapping[str, float]
    """Metrics of the attackers of this rank; empty: there are none."""
    outcome: Outcome | None = None


class Ledger:
    """Reads the outcomes of steps in their order, and logs their metrics.

    Args:
        job: the run.
        sinks: get the metrics of each step.
    """

    def __init__(self, job: Job, sinks: Sinks) -> None:
        self._job, self._sinks = job, sinks
        self._last: TakenStep | None = None  # not logged yet
        self.signal = 0
        """The signal that asked some rank to stop; 0: none did."""

    def add(self, step: TakenStep) -> None:
        """Add a step; the one before is logged already."""
        self._last = step

    def read(self) -> None:
        """Wait for the outcome of the last step, the same on all ranks; every rank must call this.

        Raises:
            StepError: a number is not finite.
        """
        step = self._last
        if step is None or step.outcome is not None:
            return
        try:
            step.outcome = step.unread.read()
        except StepError as error:
            epoch, batch = divmod(step.number, self._job.stream.steps_per_epoch)
            at = f"epoch {epoch}, batch {batch}, learning rate {step.rate:.4g}"
            advice = "try a lower --optimizer.lr or a longer --schedule.warmup-epochs"
            raise StepError(f"{error} ({at}): {advice}", error.speaks) from None
        self.signal = self.signal or step.outcome.signal

    def log(self, evaluation: Mapping[str, float] | None = None) -> None:
        """Log the last step unless that was done already, with the metrics of an evaluation after it."""
        self.read()
        step, self._last = self._last, None
        if step is None:
            return
        assert step.outcome is not None
        clean, adv = step.outcome.clean_loss, step.outcome.adv_loss
        weight = self._job.protocol.weight(step.number)
        metrics = {
            "epoch": (step.number + 1) / self._job.stream.steps_per_epoch,
            "lr": step.rate,
            "loss": (1 - weight) * clean + weight * adv,
            "clean_loss": clean,
            "adv_loss": adv,
            **step.pool,
            **(evaluation or {}),
            "seconds": step.seconds,
        }
        self._sinks.log(step.number, metrics)
