"""The training loop.

one step:   batch ──► gradients of all ranks ──► update ──► outcome, log ──► evaluate, save
on a GPU:   the outcome is read and logged one step later, so that the host does not wait for the device

A rank that only attacks takes the same loop: it has no gradients to update with, and weights come with each step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
from .profiling import profiled
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
    trace: Path = Path("trace.json"),
) -> int:
    """Take the remaining steps, or stop early after a signal; return the number of that signal, or 0."""
    first, stopped, recipe = progress.step, 0, job.task.recipe
    save_steps = recipe.checkpoint.every or job.stream.steps_per_epoch
    evaluate_steps = recipe.eval_every * job.stream.steps_per_epoch
    last: _Taken | None = None  # not logged yet
    began = time.monotonic() - progress.seconds
    with closing(profiled(job.feed(progress.step), recipe.profile, trace, job.pool)) as feed:
        for now, ahead in feed:
            job.begin_step(progress.step)
            outcome = job.member.step(now, ahead, request.signal or 0)
            if job.method.step == progress.step:  # a rank that only attacks is told that the others have stopped
                stopped = outcome.read().signal
                break
            if last is not None:
                stopped = _log(job, sinks, last)
            rate = job.rate(progress.step)
            with span("update"):
                _update(job, progress.step, rate)
            progress.seconds = time.monotonic() - began
            last = _Taken(progress.step, rate, progress.seconds, job.pool.metrics() if job.pool else {}, outcome)
            progress.step += 1
            if saver is not None:
                saver.check()
            if progress.step == job.stop:
                break
            saves = progress.step % save_steps == 0
            evaluates = evaluate_steps > 0 and progress.step % evaluate_steps == 0
            if not job.late or saves or evaluates or stopped:
                stopped = _log(job, sinks, last, evaluates) or stopped
                last = None
            if stopped:
                break
            if saves:
                _save(job, progress, saver)
    if last is not None:
        stopped = _log(job, sinks, last) or stopped
    job.member.drain(stopped if progress.step < job.stop else 0)
    if progress.step > first:  # otherwise it is the state that was resumed from
        _save(job, progress, saver)
    return stopped


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


class _Taken(NamedTuple):
    """A step that was taken, whose outcome may still be on the device."""

    step: int
    rate: float
    seconds: float
    pool: dict[str, float]
    outcome: Outcome


def _log(job: Job, sinks: Sequence[Sink], taken: _Taken, evaluates: bool = False) -> int:
    """Read the outcome of a step, the same on all ranks, and log it, with an evaluation after it if that is due.

    A number that is not finite ends the run before such weights are evaluated or saved.

    Returns:
        The signal that asked some rank to stop, or 0.
    """
    epoch, batch = divmod(taken.step, job.stream.steps_per_epoch)
    try:
        outcome = taken.outcome.read()
    except StepError as error:
        at = f"epoch {epoch}, batch {batch}, learning rate {taken.rate:.4g}"
        advice = "try a lower --optimizer.lr or a longer --schedule.warmup-epochs"
        raise StepError(f"{error} ({at}): {advice}") from None
    weight = job.adv_weight(taken.step)
    metrics = {
        "epoch": (taken.step + 1) / job.stream.steps_per_epoch,
        "lr": taken.rate,
        "loss": (1 - weight) * outcome.clean_loss + weight * outcome.adv_loss,
        "clean_loss": outcome.clean_loss,
        "adv_loss": outcome.adv_loss,
        **taken.pool,
        **(evaluate(job) if evaluates else {}),
        "seconds": taken.seconds,
    }
    for sink in sinks:
        sink.log(taken.step, metrics)
    return outcome.signal


def _update(job: Job, step: int, rate: float) -> None:
    """Update weights and running statistics; after a step that was not finite the run ends, and saves nothing."""
    if job.member.only_attacks:
        return
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    if job.to_noise is not None:
        job.to_noise.scale()
    model, recipe = job.task.model, job.task.recipe
    if recipe.scale_norms:
        scale_norms(model, job.adv_weight(step))
    if recipe.clip_norm:
        clip_grad_norm_(model.parameters(), recipe.clip_norm)
    update_running_stats(model)
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
        saver.save(progress.step, gather(job.task.model, job.optimizer, job.member.stale), position(job, progress))
