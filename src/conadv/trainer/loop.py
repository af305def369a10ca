"""The training loop.

one step:   batch ──► gradients of all ranks ──► update ──► outcome, log ──► evaluate, save
on a GPU:   the outcome is read and logged one step later, so that the host does not wait for the device (`ledger.py`)

A rank that only attacks takes the same loop: it has no gradients to update with, and weights come with each step.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any

from torch.nn.utils import clip_grad_norm_

from conadv.core.splitbn import update_running_stats
from conadv.core.step import span

from .adversary import RobustTest
from .build import Job, Policy
from .checkpoint import StateSaver
from .evaluation import evaluate_task
from .ledger import Ledger, Progress, TakenStep
from .metrics import Sinks
from .profiling import Profile
from .state import gather
from .stop import StopRequest

# Steps between two comparisons of the weights of the ranks; they are compared before each checkpoint, too.
COMPARED = 100


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
    ledger = Ledger(job, sinks)
    first = progress.step
    began = time.monotonic() - progress.seconds
    with closing(job.feed(progress.step)) as feed, closing(profile):
        for now, ahead in feed:
            profile.begin_step()
            job.protocol.begin_step(job.method, progress.step)
            unread = job.member.step(now, ahead, request.signal or 0)
            if job.method.step == progress.step:  # a rank that only attacks hears that the others have stopped
                ledger.signal = unread.read().signal
                break
            ledger.log()  # the step before
            rate = job.rate(progress.step)
            with span("update"):
                _update(job, progress.step, rate)
            progress.seconds = time.monotonic() - began
            pool = {} if job.pool is None else job.pool.metrics()
            ledger.add(TakenStep(progress.step, rate, unread, progress.seconds, pool))
            progress.step += 1
            profile.end_step()
            saver.check()
            if progress.step == job.stop:
                break
            saves = progress.step % policy.save_steps == 0
            evaluates = policy.evaluate_steps > 0 and progress.step % policy.evaluate_steps == 0
            if not policy.late or saves or evaluates or ledger.signal:
                ledger.read()  # an error ends the run before such weights are evaluated or saved
                ledger.log(evaluate(job) if evaluates else {})
            if progress.step % COMPARED == 0:
                job.member.check_weights(progress.step)
            if ledger.signal:
                break
            if saves:
                _save(job, progress, saver)
    ledger.log()
    job.member.drain(ledger.signal if progress.step < job.stop else 0)
    if progress.step > first:  # otherwise it is the state that was resumed from
        _save(job, progress, saver)
    return ledger.signal


def _update(job: Job, step: int, rate: float) -> None:
    """Update weights and running statistics; after a step that was not finite the run ends, and saves nothing."""
    if job.member.only_attacks:
        return
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    job.protocol.scale(job.task.model, step)
    if job.clip_norm:
        clip_grad_norm_(job.task.model.parameters(), job.clip_norm)
    update_running_stats(job.task.model)
    job.optimizer.step()
    job.optimizer.zero_grad()


def evaluate(job: Job, robust: RobustTest | None = None) -> dict[str, float]:
    """Evaluate the current weights on all ranks; those that only attack get them first."""
    job.member.share_weights()
    return evaluate_task(job.task, job.world, robust)


def _save(job: Job, progress: Progress, saver: StateSaver) -> None:
    job.member.check_weights(progress.step)
    state = partial(gather, job.task.model, job.optimizer, job.stale)
    saver.save(progress.step, state, position=position(job, progress))


def position(job: Job, progress: Progress) -> dict[str, Any]:
    """Return the progress of a run as entries of its summary."""
    images = progress.step * job.stream.batch_size
    return {
        "layout": str(job.layout),
        "world_size": job.world.size,
        "steps": progress.step,
        "seconds": progress.seconds,
        "images_per_second": images / progress.seconds if progress.seconds else 0.0,
    }
