"""The training loop.

one step:   batch ──► gradients of all ranks ──► outcome ──► update ──► log ──► evaluate, save
on a GPU:   the outcome is read and logged one step later, so that the host does not wait for the device (`ledger.py`)
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

from torch.nn.utils import clip_grad_norm_

from conadv.core.splitbn import update_running_stats
from conadv.core.step import span

from .build import Job, Policy
from .checkpoint import StateSaver
from .evaluation import evaluate_task
from .ledger import Ledger, Progress, TakenStep
from .metrics import Sinks
from .profiling import Profile
from .state import gather
from .stop import StopRequest
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
    undo = Undo(job.task.model, job.optimizer, job.ema)
    ledger = Ledger(job, progress, policy, sinks, undo)
    first = progress.step
    began = time.monotonic() - progress.seconds
    with closing(job.batches(progress.step)) as batches, closing(profile):
        for now, ahead in job.member.feed(batches) if progress.step < job.stop else ():
            profile.begin_step()
            job.protocol.begin_step(job.method, progress.step)
            unread = job.member.step(now, ahead, request.signal or 0, saver.requests_save(policy.save_seconds))
            step = TakenStep(progress.step, job.rate(progress.step), unread)
            ledger.add(step)
            job.stale.keep()
            with span("update"):
                _update(job, policy, step, undo)
            progress.step += 1
            step.seconds = progress.seconds = time.monotonic() - began
            profile.end_step()
            saver.check()
            if progress.step == job.stop:
                break
            saves = ledger.save_requested or progress.step % policy.save_steps == 0
            evaluates = policy.evaluate_steps > 0 and progress.step % policy.evaluate_steps == 0
            if not policy.late or saves or evaluates or ledger.stop_signal:
                ledger.read(step)  # an error ends the run before such weights are evaluated or saved
                ledger.log(evaluate_task(job.task, job.world, job.ema) if evaluates else {})
            if ledger.stop_signal:
                break
            if saves:
                _save(job, progress, saver)
                ledger.save_requested = False
    ledger.log()
    job.member.drain()
    if progress.step > first:  # otherwise it is the state that was resumed from
        _save(job, progress, saver)
    return ledger.stop_signal


def _update(job: Job, policy: Policy, step: TakenStep, undo: Undo) -> None:
    """Update weights and running statistics, unless the step has a number that is not finite.

    If the outcome is read later, --nonfinite skip lets the device undo the update. With --nonfinite stop the run ends
    before the next update, and saves nothing in between.
    """
    if step.outcome is not None and step.outcome.culprits is not None:
        job.member.exchange.discard()
        return
    may_undo = step.outcome is None and policy.nonfinite == "skip"
    if may_undo:
        undo.keep()
    _apply(job, step)
    if may_undo:
        undo.undo_unless(step.unread.finite)
    undo.is_ready = True


def _apply(job: Job, step: TakenStep) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = step.rate
    job.protocol.scale(job.task.model, step.number)
    if job.clip_norm:
        clip_grad_norm_(job.task.model.parameters(), job.clip_norm)
    update_running_stats(job.task.model)
    job.optimizer.step()
    job.ema.update()


def _save(job: Job, progress: Progress, saver: StateSaver) -> None:
    state = partial(gather, job.task.model, job.optimizer, job.stale, job.ema)
    saver.save(progress.step, state, position=position(job, progress))


def position(job: Job, progress: Progress) -> dict[str, Any]:
    """Return the progress of a run as entries of its summary."""
    images = progress.step * job.stream.batch_size
    return {
        "layout": str(job.layout),
        "world_size": job.world.size,
        "steps": progress.step,
        "skipped": progress.skipped,
        "seconds": progress.seconds,
        "images_per_second": images / progress.seconds if progress.seconds else 0.0,
    }
