"""A run, step by step: data, method, exchange, update, record. Nothing calls back up."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from conadv.core.spans import span
from conadv.core.splitbn import update_running_stats
from conadv.parallel.outcome import NotFiniteError, Outcome

from .build import Job, Policy
from .diagnosis import diagnose
from .evaluation import evaluate_task
from .profiling import Profile
from .record import Sinks, StateSaver
from .signals import StopRequest
from .state import live_state


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    skipped: int = 0


def run(
    job: Job,
    progress: Progress,
    policy: Policy,
    request: StopRequest,
    sinks: Sinks,
    saver: StateSaver,
    profile: Profile,
) -> int:
    """Take the remaining steps, or stop early after a signal; return the number of that signal, or 0."""
    save = partial(_save, job, progress, saver)
    first = progress.step
    began = time.monotonic() - progress.seconds
    stopped_by = 0
    with closing(job.batches(progress.step)) as batches, closing(profile):
        for now, ahead in job.method.feed(batches):
            profile.begin_step()
            outcome = job.member.step(now, ahead, request.signal or 0)
            job.member.check_weights(progress.step, outcome)
            measured = _diagnose(job, progress.step, policy)
            saver.before_update()
            job.stale.keep()
            rate = job.rate(progress.step)
            if outcome.culprits is None:
                with span("update"):
                    _update(job, rate)
            else:
                _leave_out(job, progress, policy, outcome, rate)
            progress.step += 1
            progress.seconds = time.monotonic() - began
            profile.end_step()
            saver.check()
            sinks.log(progress.step - 1, _metrics(job, progress, policy, outcome, rate) | measured)
            stopped_by = outcome.stop
            if stopped_by:
                break
            if _is_due(progress.step, policy, saver) and progress.step < job.stop:
                save()
    job.member.drain()
    if progress.step > first:  # the state that a finished run resumes from is saved already
        save()
    return stopped_by


def _diagnose(job: Job, step: int, policy: Policy) -> dict[str, float]:
    """What is known of the staleness of this step, if it is due."""
    return diagnose(job, step) if policy.diagnose_steps and (step + 1) % policy.diagnose_steps == 0 else {}


def _update(job: Job, rate: float) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    update_running_stats(job.task.model)
    job.optimizer.step()
    job.ema.update()


def _leave_out(job: Job, progress: Progress, policy: Policy, outcome: Outcome, rate: float) -> None:
    """A step whose numbers are not finite reaches neither the weights nor the statistics, on any rank."""
    job.member.exchange.discard()
    progress.skipped += 1
    told = _not_finite(job, progress.step, outcome, rate)
    if policy.nonfinite == "stop":
        job.member.drain()
        raise NotFiniteError(
            f"{told}: try a lower --optimizer.lr, a longer --schedule.warmup-epochs, or --nonfinite skip"
        )
    if progress.skipped > policy.skip_limit:
        job.member.drain()
        raise NotFiniteError(f"{told}, after {policy.skip_limit} such steps were left out: try a lower --optimizer.lr")


def _not_finite(job: Job, step: int, outcome: Outcome, rate: float) -> str:
    """What happened where, in words."""
    epoch, batch = divmod(step, job.stream.steps_per_epoch)
    what = job.member.not_finite(outcome)
    return f"step {step}: {what} is not finite (epoch {epoch}, batch {batch}, learning rate {rate:.4g})"


def _metrics(job: Job, progress: Progress, policy: Policy, outcome: Outcome, rate: float) -> dict[str, Any]:
    """The metrics of the step that was just taken, with those of an evaluation if one is due."""
    weight = job.adv_weight
    metrics = {
        "epoch": progress.step / job.stream.steps_per_epoch,
        "lr": rate,
        "loss": (1 - weight) * outcome.clean_loss + weight * outcome.adv_loss,
        "clean_loss": outcome.clean_loss,
        "adv_loss": outcome.adv_loss,
        "skipped": outcome.culprits is not None,
    }
    if policy.evaluate_steps and progress.step % policy.evaluate_steps == 0 and progress.step < job.stop:
        metrics |= evaluate_task(job.task, job.world, job.ema)
    return {**metrics, "seconds": progress.seconds}


def _is_due(step: int, policy: Policy, saver: StateSaver) -> bool:
    by_time = policy.save_seconds and saver.seconds_since_save() >= policy.save_seconds
    return bool(by_time) or step % policy.save_steps == 0


def _save(job: Job, progress: Progress, saver: StateSaver) -> None:
    state = partial(live_state, job.task.model, job.optimizer, job.stale, job.ema)
    saver.save(progress.step, state, position=position(job, progress))


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
