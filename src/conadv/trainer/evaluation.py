"""Evaluation of a task, shared by the ranks: each takes its part of the images, and the sums go over all of them."""

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
# What the sample of training images is drawn with: the same in every run, so that runs can be compared.
_SAMPLE = 14


def evaluate_source(
    task: Task, world: World, source: Source, attack: Attack | None = None, sample: int | None = None
) -> Evaluation:
    """Accuracy and loss on images of a source, without augmentation.

    Args:
        task: the model, and how it computes.
        world: the ranks, all of which call this.
        source: the images.
        attack: also the accuracy under this attack.
        sample: take so many of the images, always the same; None: all.
    """
    chosen = sampled(len(source), sample)
    first, last = (len(chosen) * rank // world.size for rank in (world.rank, world.rank + 1))
    totals = torch.zeros(5, dtype=torch.float64, device=world.device)
    if first < last:
        pins = task.device.type == "cuda"
        part = chosen[first:last].tolist()
        batches = evaluation_batches(source, _BATCH, task.augment.fit, task.workers, part, pin_memory=pins)
        own = evaluate(task.model, batches, device=task.device, attack=attack, seed=first, autocast=task.autocast)
        figures = (own.top1, own.top5, own.loss, own.robust_top1 or 0.0)
        totals += totals.new_tensor([own.images, *(figure * own.images for figure in figures)])
    images, *sums = world.all_reduce(totals).tolist()
    top1, top5, loss, robust = (figure / images for figure in sums)
    return Evaluation(top1, top5, loss, int(images), None if attack is None else robust)


def sampled(length: int, count: int | None) -> NDArray[np.int64]:
    """At most `count` of the numbers below `length`, drawn at random once and for all, in order."""
    if count is None or count >= length:
        return np.arange(length)
    return np.sort(permutation(length, _SAMPLE)[:count])


def robust_attack(epsilon: float, steps: int, branch: str = "main") -> PGD:
    """PGD within `epsilon`, with steps long enough to cross the ball and come back."""
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    return PGD(epsilon, size, steps, random_start=1.0, branch=branch, statistics="running")


def evaluate_task(task: Task, world: World, ema: Ema, attack: Attack | None = None) -> dict[str, float]:
    """What a summary says of a model: percentages on test and training images, and the gap between them.

    With a moving average of the weights these are its numbers; `raw_test_top1` is that of the weights themselves.
    """
    with not_compiled(task.model):  # batches of other sizes would need graphs of their own
        with ema.swapped_in():
            test = evaluate_source(task, world, task.data.test, attack)
            train = evaluate_source(task, world, task.data.train, sample=task.train_sample)
        figures = {"test_top1": test.top1}
        if ema:
            figures["raw_test_top1"] = evaluate_source(task, world, task.data.test).top1
    figures |= {
        "test_top5": test.top5,
        "train_top1": train.top1,
        "gap": train.top1 - test.top1,
        "test_loss": test.loss,
        "train_loss": train.loss,
    }
    return figures if test.robust_top1 is None else {**figures, "robust_top1": test.robust_top1}
