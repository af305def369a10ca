"""A run, step by step: data, method, exchange, update, record. Nothing calls back up."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

from conadv.core.spans import span
from conadv.core.splitbn import update_running_stats

from .build import Job, Policy
from .diagnosis import diagnose
from .evaluation import evaluate_task
from .ledger import Ledger, Progress, Step
from .profiling import Profile
from .record import Sinks, StateSaver
from .signals import StopRequest
from .state import live_state
from .undo import Undo


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
    undo = Undo(job.task.model, job.optimizer, job.ema)
    ledger = Ledger(job, progress, policy, sinks, undo)
    first, asked = progress.step, False
    began = time.monotonic() - progress.seconds
    with closing(job.batches(progress.step)) as batches, closing(profile):
        for now, ahead in job.method.feed(batches) if progress.step < job.stop else ():
            profile.begin_step()
            due = not asked and _is_due_by_time(policy, saver)
            asked = asked or due  # once: a rank that may lag hears of it some steps later
            unread = job.member.step(now, ahead, request.signal or 0, due)
            step = Step(progress.step, job.rate(progress.step), unread)
            ledger.settle()  # the step before, where it is read late
            if not (policy.late and (undo.is_ready or policy.nonfinite == "stop")):
                ledger.read(step)
            step.measured = _diagnose(job, progress.step, policy)
            saver.before_update()
            job.stale.keep()
            with span("update"):
                _update(job, policy, step, undo)
            progress.step += 1
            step.seconds = progress.seconds = time.monotonic() - began
            profile.end_step()
            saver.check()
            ledger.open(step)
            saves = ledger.save_asked or progress.step % policy.save_steps == 0
            evaluates = policy.evaluate_steps > 0 and progress.step % policy.evaluate_steps == 0
            if not policy.late or saves or evaluates or ledger.stopped_by:
                ledger.settle(partial(_evaluate, job, evaluates and progress.step < job.stop))
            if ledger.stopped_by:
                break
            if saves and progress.step < job.stop:
                save()
                ledger.save_asked = asked = False
    ledger.settle()
    job.member.drain()
    if progress.step > first:  # the state that a finished run resumes from is saved already
        save()
    return ledger.stopped_by


def _diagnose(job: Job, step: int, policy: Policy) -> dict[str, float]:
    """What is known of the staleness of this step, if it is due."""
    return diagnose(job, step) if policy.diagnose_steps and (step + 1) % policy.diagnose_steps == 0 else {}


def _evaluate(job: Job, is_due: bool) -> dict[str, float]:
    return evaluate_task(job.task, job.world, job.ema) if is_due else {}


def _update(job: Job, policy: Policy, step: Step, undo: Undo) -> None:
    """Update the weights; a step whose numbers are not finite reaches neither them nor the statistics, on any rank.

    Where it is read late, the device itself takes the update back or, with --nonfinite stop, the run ends before the
    next update, and saves nothing in between.
    """
    if step.outcome is not None and step.outcome.culprits is not None:
        job.member.exchange.discard()
        return
    takes_back = step.outcome is None and policy.nonfinite == "skip"
    if takes_back:
        undo.keep()
    _apply(job, step.rate)
    if takes_back:
        undo.undo_unless(step.unread.finite)
    undo.is_ready = True


def _apply(job: Job, rate: float) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    update_running_stats(job.task.model)
    job.optimizer.step()
    job.ema.update()


def _is_due_by_time(policy: Policy, saver: StateSaver) -> bool:
    return bool(policy.save_seconds) and saver.seconds_since_save() >= policy.save_seconds


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
