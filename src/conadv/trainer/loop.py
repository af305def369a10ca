"""The training loop.

one step:   batch ──► gradients of all ranks ──► update ──► outcome, log ──► evaluate, save
on a GPU:   the outcome is read and logged one step later, so that the host does not wait for the device

A rank that only attacks takes the same loop: it has no gradients to update with, and weights come with each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from conadv.core.branches import split_layers
from conadv.core.splitbn import update_running_stats
from conadv.ranks.member import Outcome, StepError
from conadv.sinks import Sink
from conadv.task.evaluate import RobustTest
from conadv.wrappers import span

from .build import Job
from .checkpoint import CheckpointSaver, gather
from .evaluation import evaluate_task
from .profiling import Recording, profiled
from .stop import StopRequest


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0


def run(
    job: Job,
    progress: Progress,
    request: StopRequest,
    sinks: Sequence[Sink] = (),
    saver: CheckpointSaver | None = None,
    recording: Recording | None = None,
) -> int:
    """Take the remaining steps, or stop early after a signal; return the number of that signal, or 0."""
    outcomes = _Outcomes(job, sinks)
    first = progress.step
    began = time.monotonic() - progress.seconds
    with closing(profiled(job.feed(progress.step), recording)) as feed:
        for now, ahead in feed:
            job.begin_step(progress.step)
            outcome = job.member.step(now, ahead, request.signal or 0)
            if job.method.step == progress.step:  # a rank that only attacks is told that the others have stopped
                outcomes.signal = outcome.read().signal
                break
            outcomes.log()  # of the step before
            rate = job.rate(progress.step)
            with span("update"):
                _update(job, progress.step, rate)
            progress.seconds = time.monotonic() - began
            outcomes.add(progress.step, rate, progress.seconds, outcome)
            progress.step += 1
            if saver is not None:
                saver.check()
            if progress.step == job.stop:
                break
            saves = progress.step % job.save_steps == 0
            evaluates = job.evaluate_steps > 0 and progress.step % job.evaluate_steps == 0
            if not job.late or saves or evaluates or outcomes.signal:
                outcomes.read()  # an error ends the run before such weights are evaluated or saved
                outcomes.log(evaluate(job) if evaluates else {})
            if outcomes.signal:
                break
            if saves:
                _save(job, progress, saver)
    outcomes.log()
    job.member.drain(outcomes.signal if progress.step < job.stop else 0)
    if progress.step > first:  # otherwise it is the state that was resumed from
        _save(job, progress, saver)
    return outcomes.signal


def evaluate(job: Job, robust: RobustTest | None = None) -> dict[str, float]:
    """Evaluate the current weights on all ranks; those that only attack get them first."""
    job.member.share_weights()
    return evaluate_task(job.task, job.member.world, robust)


def position(job: Job, progress: Progress) -> dict[str, Any]:
    """Return the progress of a run as entries of its summary."""
    images = progress.step * job.stream.batch_size
    return {
        "layout": str(job.member.layout),
        "world_size": job.member.world.size,
        "steps": progress.step,
        "seconds": progress.seconds,
        "images_per_second": images / progress.seconds if progress.seconds else 0.0,
    }


class _Outcomes:
    """Reads and logs the outcomes of steps in their order: the last step waits to be read."""

    def __init__(self, job: Job, sinks: Sequence[Sink]) -> None:
        self._job, self._sinks = job, sinks
        self._last: tuple[int, dict[str, float], float] | None = None  # not logged yet
        self._unread: Outcome | None = None
        self._outcome: Outcome | None = None
        self.signal = 0
        """The signal that asked some rank to stop; 0: none did."""

    def add(self, step: int, rate: float, seconds: float, outcome: Outcome) -> None:
        """Add a step; the one before is logged already."""
        pool = {} if self._job.pool is None else self._job.pool.metrics()
        self._last, self._unread = (step, {"lr": rate, **pool}, seconds), outcome

    def read(self) -> None:
        """Wait for the outcome of the last step, the same on all ranks; every rank must call this.

        Raises:
            StepError: a number is not finite.
        """
        if self._last is None or self._unread is None:
            return
        unread, self._unread = self._unread, None
        try:
            self._outcome = unread.read()
            self.signal = self.signal or self._outcome.signal
        except StepError as error:
            step, known, _ = self._last
            epoch, batch = divmod(step, self._job.stream.steps_per_epoch)
            at = f"epoch {epoch}, batch {batch}, learning rate {known['lr']:.4g}"
            advice = "try a lower --optimizer.lr or a longer --schedule.warmup-epochs"
            raise StepError(f"{error} ({at}): {advice}", error.speaks) from None

    def log(self, evaluation: Mapping[str, float] | None = None) -> None:
        """Log the last step unless that was done already, with the metrics of an evaluation after it."""
        self.read()
        if self._last is None:
            return
        (step, known, seconds), self._last = self._last, None
        outcome, weight = self._outcome, self._job.adv_weight(step)
        assert outcome is not None
        metrics = {
            "epoch": (step + 1) / self._job.stream.steps_per_epoch,
            "lr": known.pop("lr"),
            "loss": (1 - weight) * outcome.clean_loss + weight * outcome.adv_loss,
            "clean_loss": outcome.clean_loss,
            "adv_loss": outcome.adv_loss,
            **known,
            **(evaluation or {}),
            "seconds": seconds,
        }
        for sink in self._sinks:
            sink.log(step, metrics)


def _update(job: Job, step: int, rate: float) -> None:
    """Update weights and running statistics; after a step that was not finite the run ends, and saves nothing."""
    if job.member.only_attacks:
        return
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    if job.signal is not None:
        job.signal.scale()
    if job.task.recipe.scale_norms:
        scale_norms(job.task.model, job.adv_weight(step))
    if job.task.recipe.clip_norm:
        clip_grad_norm_(job.task.model.parameters(), job.task.recipe.clip_norm)
    update_running_stats(job.task.model)
    job.optimizer.step()
    job.optimizer.zero_grad()


@torch.no_grad()
def scale_norms(model: nn.Module, adv_weight: float) -> None:
    """Divide the gradients of BatchNorm's weight and bias by the share of their branch in the loss.

    Each branch sees a part of the loss only, so that its own parameters learn more slowly than in plain training, and
    all others do not. Without a branch of their own, twins go through main.
    """
    for layer in split_layers(model):
        clean = [name for name in layer.branches if name != "adv"]
        rest = 1 - adv_weight if "adv" in layer.branches else 1.0
        for name in layer.branches:
            share = adv_weight if name == "adv" else rest / len(clean)
            for parameter in layer.owner(name).parameters(recurse=False):
                if parameter.grad is not None and share > 0:
                    parameter.grad.div_(share)


def _save(job: Job, progress: Progress, saver: CheckpointSaver | None) -> None:
    job.member.check_weights(progress.step)
    if saver is not None:
        state = gather(job.task.model, job.optimizer, job.member.stale)
        saver.save(progress.step, state, position(job, progress))
