"""Evaluation shared by the ranks: each evaluates a part of the images, and an all_reduce combines the results."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from conadv.ranks.world import World
from conadv.task.data import Source
from conadv.task.draws import permutation
from conadv.task.evaluate import Evaluation, count_robust, count_twin_hits, evaluate
from conadv.task.stream import evaluation_batches

from .adversary import RobustTest, TwinTest
from .build_task import Task
from .kernels import not_compiled

_BATCH = 256
# Seed of the sample of training images: the same in every run, so that runs can be compared.
_SAMPLE_SEED = 14
_TWINS = 1000  # training images, about, whose twins are evaluated


def evaluate_source(task: Task, world: World, source: Source, sample: int | None = None) -> Evaluation:
    """Compute accuracy and loss on the images of a source, without augmentation.

    Args:
        task: the model and its settings.
        world: the ranks, all of which must call this.
        source: the images.
        sample: how many of the images to use, always the same ones; None: all.
    """
    chosen = sampled(len(source), sample)
    first, last = (len(chosen) * rank // world.size for rank in (world.rank, world.rank + 1))
    part = chosen[first:last].tolist()
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)
    if part:
        pin_memory = task.device.type == "cuda"
        batches = evaluation_batches(source, _BATCH, task.augment.fit, task.workers, part, pin_memory=pin_memory)
        own = evaluate(task.model, batches, task.autocast)
        means = (own.top1, own.top5, own.loss)
        totals += totals.new_tensor([own.images, *(mean * own.images for mean in means)])
    images, *sums = world.all_reduce(totals).tolist()
    top1, top5, loss = (total / images for total in sums)
    return Evaluation(top1, top5, loss, int(images))


def robust_top1(task: Task, world: World, source: Source, test: RobustTest) -> float:
    """Compute the robust accuracy in percent, of the model in eval mode. Every rank must call it.

    Ranks share whole batches, on which the random starts depend: the result is that of one rank.
    """
    chosen, first = _part(world, _batches_of(sampled(len(source), test.images), _BATCH))
    restarts = 1 if test.autoattack else test.restarts
    batches = evaluation_batches(source, _BATCH, task.augment.fit, task.workers, chosen)
    return _percent(
        world, count_robust(task.model, batches, test.attack(), restarts=restarts, first=first, autocast=task.autocast)
    )


def twin_top1(task: Task, world: World, twins: TwinTest) -> float:
    """Compute the accuracy in percent on twins of training images, as the model sees them in training.

    It is higher than on the images themselves if the network reads the label from the statistics of a batch that was
    attacked as a whole. Every rank must call it.
    """
    images = len(task.data.train)
    size = min(twins.chunk_size, images)
    group = size * twins.shuffled
    whole = sampled(images, max(min(_TWINS, images) // group, 1) * group)
    chosen, first = _part(world, _batches_of(whole, group))
    batches = evaluation_batches(task.data.train, size, task.augment.fit, task.workers, chosen)
    counts = count_twin_hits(
        task.model,
        batches,
        twins.attack,
        twins.branch,
        loss=task.loss,
        first=first * twins.shuffled,
        autocast=task.autocast,
        shuffled=twins.shuffled,
    )
    return _percent(world, counts)


def _batches_of(chosen: NDArray[np.int64], size: int) -> list[list[int]]:
    return [chosen[start : start + size].tolist() for start in range(0, len(chosen), size)]


def _part(world: World, batches: list[list[int]]) -> tuple[list[int], int]:
    """The indices in those batches that this rank evaluates, and the number of its first batch."""
    first, last = (len(batches) * rank // world.size for rank in (world.rank, world.rank + 1))
    return [index for batch in batches[first:last] for index in batch], first


def _percent(world: World, counts: tuple[int, int]) -> float:
    """The share of hits over all ranks, from the hits and images of each."""
    hits, images = world.all_reduce(torch.tensor(counts, dtype=torch.float64, device=world.device)).tolist()
    return float(100 * hits / images) if images else math.nan  # fewer images than ranks


def sampled(length: int, count: int | None) -> NDArray[np.int64]:
    """Return `count` of the indices below `length`, in order: a random sample with a fixed seed. None: all."""
    if count is None or count >= length:
        return np.arange(length)
    return np.sort(permutation(length, _SAMPLE_SEED)[:count])


def evaluate_task(task: Task, world: World, robust: RobustTest | None = None) -> dict[str, float]:
    """Return the metrics of a model for its summary: accuracy in percent on test and training images, and the gap.

    `adv_top1` is the accuracy on twins of training images, see `twin_top1`. Every rank must call it.

    Args:
        task: the model, its data and its settings.
        world: the ranks.
        robust: also compute the robust accuracy on test images.
    """
    with not_compiled(task.model):  # batches of other sizes would be compiled again
        test = evaluate_source(task, world, task.data.test)
        train = evaluate_source(task, world, task.data.train, sample=task.train_sample)
        attacked = _under_attack(task, world, robust)
    metrics = {"test_top1": test.top1}
    if len(task.data.test.classes) > 5:  # otherwise it is 100 %
        metrics["test_top5"] = test.top5
    metrics |= {
        "train_top1": train.top1,
        "gap": train.top1 - test.top1,
        "test_loss": test.loss,
        "train_loss": train.loss,
    }
    return metrics | attacked


def _under_attack(task: Task, world: World, robust: RobustTest | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if task.twins is not None:
        metrics["adv_top1"] = twin_top1(task, world, task.twins)
    if task.held_out is not None:
        metrics["held_out_top1"] = evaluate_source(task, world, task.held_out.source).top1
        metrics["held_out_robust_top1"] = robust_top1(task, world, task.held_out.source, task.held_out.test)
    if robust is not None:
        metrics["robust_top1"] = robust_top1(task, world, task.data.test, robust)
    return metrics
