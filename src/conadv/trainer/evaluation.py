"""Evaluation shared by the ranks: each evaluates a part of the images, and an all_reduce combines the results."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from conadv.core.attack import Attack
from conadv.core.pgd import PGD
from conadv.parallel.collectives import World
from conadv.task.data import Source, evaluation_batches
from conadv.task.data.draws import permutation
from conadv.task.evaluate import Evaluation, evaluate

from .build_task import Task
from .compiling import not_compiled
from .ema import Ema

_BATCH = 256
# Seed of the sample of training images: the same in every run, so that runs can be compared.
_SAMPLE_SEED = 14


def evaluate_source(
    task: Task, world: World, source: Source, attack: Attack | None = None, sample: int | None = None
) -> Evaluation:
    """Compute accuracy and loss on the images of a source, without augmentation.

    Args:
        task: the model and its settings.
        world: the ranks, all of which must call this.
        source: the images.
        attack: also compute the accuracy under this attack.
        sample: how many of the images to use, always the same ones; None: all.
    """
    chosen = sampled(len(source), sample)
    first, last = (len(chosen) * rank // world.size for rank in (world.rank, world.rank + 1))
    totals = torch.zeros(5, dtype=torch.float64, device=world.device)
    if first < last:
        pin_memory = task.device.type == "cuda"
        part = chosen[first:last].tolist()
        batches = evaluation_batches(source, _BATCH, task.augment.fit, task.workers, part, pin_memory=pin_memory)
        own = evaluate(task.model, batches, device=task.device, attack=attack, seed=first, autocast=task.autocast)
        means = (own.top1, own.top5, own.loss, own.robust_top1 or 0.0)
        totals += totals.new_tensor([own.images, *(mean * own.images for mean in means)])
    images, *sums = world.all_reduce(totals).tolist()
    top1, top5, loss, robust = (total / images for total in sums)
    return Evaluation(top1, top5, loss, int(images), None if attack is None else robust)


def sampled(length: int, count: int | None) -> NDArray[np.int64]:
    """Return `count` of the indices below `length`, in order: a random sample with a fixed seed. None: all."""
    if count is None or count >= length:
        return np.arange(length)
    return np.sort(permutation(length, _SAMPLE_SEED)[:count])


def robust_attack(epsilon: float, steps: int, branch: str = "main") -> PGD:
    """Return PGD within `epsilon`, with a step size large enough to cross the ball and come back."""
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    return PGD(epsilon, size, steps, random_start=1.0, branch=branch, statistics="running")


def evaluate_task(task: Task, world: World, ema: Ema, attack: Attack | None = None) -> dict[str, float]:
    """Return the metrics of a model for its summary: accuracy in percent on test and training images, and the gap.

    If there is a moving average of the weights, it is evaluated, and `raw_test_top1` is of the weights themselves.
    Every rank must call it.
    """
    with not_compiled(task.model):  # batches of other sizes would be compiled again
        with ema.swapped_in():
            test = evaluate_source(task, world, task.data.test, attack)
            train = evaluate_source(task, world, task.data.train, sample=task.train_sample)
        metrics = {"test_top1": test.top1}
        if ema:
            metrics["raw_test_top1"] = evaluate_source(task, world, task.data.test).top1
    metrics |= {
        "test_top5": test.top5,
        "train_top1": train.top1,
        "gap": train.top1 - test.top1,
        "test_loss": test.loss,
        "train_loss": train.loss,
    }
    return metrics if test.robust_top1 is None else {**metrics, "robust_top1": test.robust_top1}
