"""A run, step by step: data, method, exchange, update, record. Nothing calls back up."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from conadv.core.splitbn import settle
from conadv.parallel.comm import Outcome

from .build import Job, Policy
from .evaluation import evaluate_task
from .record import Recorder
from .signals import StopRequest
from .state import StaleWeights, gather


class NotFiniteError(FloatingPointError):
    """A run that cannot go on, and what to try."""


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    skipped: int = 0


def run(
    job: Job, progress: Progress, stale: StaleWeights, policy: Policy, request: StopRequest, recorder: Recorder
) -> bool:
    """Take the steps that are left; whether the run came to its end, rather than being asked to stop."""
    save = partial(_save, job, progress, stale, recorder)
    began = time.monotonic() - progress.seconds
    with closing(job.batches(progress.step)) as batches:
        for now, ahead in job.method.feed(batches):
            job.exchange.zero()
            losses = job.method(now, ahead)
            outcome = job.exchange.finish(losses, stop=request.signal is not None)
            rate = job.rate(progress.step)
            stale.keep()
            if outcome.finite:
                _update(job, rate)
            else:
                _leave_out(job, progress, policy, outcome, rate)
            progress.step += 1
            progress.seconds = time.monotonic() - began
            _record(job, progress, policy, outcome, rate, recorder)
            if outcome.stop:
                break
            if _is_due(progress.step, policy, recorder) and progress.step < job.stop:
                save()
    if job.handoff is not None:
        job.handoff.drain()
    save()
    return progress.step == job.stop


def _update(job: Job, rate: float) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    settle(job.task.model)
    job.optimizer.step()


def _leave_out(job: Job, progress: Progress, policy: Policy, outcome: Outcome, rate: float) -> None:
    """A step whose numbers are not finite reaches neither the weights nor the statistics, on any rank."""
    job.exchange.discard()
    progress.skipped += 1
    place = "" if outcome.rank is None else f" on {job.layout.describe(outcome.rank)}"
    what = "loss" if outcome.rank is not None else "gradient"
    told = f"the {what} of step {progress.step}{place} is not finite (batch {progress.step}, learning rate {rate:.4g})"
    if policy.nonfinite == "stop":
        raise NotFiniteError(
            f"{told}: try a lower --optimizer.lr, a longer --schedule.warmup-epochs, or --nonfinite skip"
        )
    if progress.skipped > policy.skip_limit:
        raise NotFiniteError(f"{told}, after {policy.skip_limit} such steps were left out: try a lower --optimizer.lr")


def _record(job: Job, progress: Progress, policy: Policy, outcome: Outcome, rate: float, recorder: Recorder) -> None:
    weight = job.adv_weight
    figures = {
        "epoch": progress.step / job.stream.steps_per_epoch,
        "lr": rate,
        "loss": (1 - weight) * outcome.clean_loss + weight * outcome.adv_loss,
        "clean_loss": outcome.clean_loss,
        "adv_loss": outcome.adv_loss,
        "skipped": not outcome.finite,
    }
    if policy.evaluate_steps and progress.step % policy.evaluate_steps == 0 and progress.step < job.stop:
        figures |= evaluate_task(job.task, job.world)
    recorder.step(progress.step - 1, **figures, seconds=progress.seconds)


def _is_due(step: int, policy: Policy, recorder: Recorder) -> bool:
    by_time = policy.save_seconds and recorder.seconds_since_save() >= policy.save_seconds
    return bool(by_time) or step % policy.save_steps == 0


def _save(job: Job, progress: Progress, stale: StaleWeights, recorder: Recorder) -> None:
    state = partial(gather, job.task.model, job.optimizer, stale)
    recorder.save(progress.step, state, position=position(job, progress))


def position(job: Job, progress: Progress) -> dict[str, Any]:
    """What a summary says of how a run went so far."""
    images = progress.step * job.stream.batch_size
    return {
        "layout": str(job.layout),
        "world_size": job.world.size,
        "steps": progress.step,
        "skipped": progress.skipped,
        "seconds": progress.seconds,
        "images_per_second": images / progress.seconds if progress.seconds else 0.0,
    }
