"""Evaluation of a model on all ranks: accuracy as it is, on twins, and under attack; what is shown beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conadv.core.branches import split_layers
from conadv.core.splitbn import route
from conadv.ranks.world import World
from conadv.sinks import Board
from conadv.task.data import Source
from conadv.task.draws import permutation
from conadv.task.evaluate import RobustTest, TwinTest, count_robust, count_twin_hits, evaluate, inputs
from conadv.task.models import in_mode
from conadv.task.stream import Chunk, evaluation_batches

from .build import Task

_WATCH_STEPS = 10  # of PGD on held-out images: it runs during training
_BATCH = 256
# Seed of the sample of training images: the same in every run, so that runs can be compared.
_SAMPLE_SEED = 14
_TWINS = 1000  # training images, about, whose twins are evaluated
_SHOWN = 1000  # test images whose accuracy by branch is computed
_PAIRS = 8
NAME = "images_twins_differences"  # the differences are enlarged


class Accuracy(NamedTuple):
    """Accuracies in percent, and the mean loss."""

    top1: float
    top5: float
    loss: float


def evaluate_task(task: Task, world: World, robust: RobustTest | None = None) -> dict[str, float]:
    """Return the metrics of a model for its summary: accuracy in percent on test and training images, and the gap.

    Of methods with twins also `adv_top1`, with held-out images also their accuracy, and with `robust` also the robust
    accuracy on test images. Every rank must call it.
    """
    test = evaluate_source(task, world, task.data.test)
    train = evaluate_source(task, world, task.data.train, sample=len(task.data.test))
    metrics = {"test_top1": test.top1}
    if len(task.data.test.classes) > 5:  # otherwise it is 100 %
        metrics["test_top5"] = test.top5
    metrics |= {"train_top1": train.top1, "gap": train.top1 - test.top1}
    metrics |= {"test_loss": test.loss, "train_loss": train.loss}
    if task.twins is not None:
        metrics["adv_top1"] = twin_top1(task, world, task.twins)
    if task.held_out is not None:
        watch = RobustTest(task.recipe.attack.epsilon, task.recipe.attack.norm, _WATCH_STEPS, restarts=1)
        metrics["held_out_top1"] = evaluate_source(task, world, task.held_out).top1
        metrics["held_out_robust_top1"] = robust_top1(task, world, task.held_out, watch)
    if robust is not None:
        metrics["robust_top1"] = robust_top1(task, world, task.data.test, robust)
    return metrics


def evaluate_source(task: Task, world: World, source: Source, sample: int | None = None) -> Accuracy:
    """Compute accuracy and loss on the images of a source, or a sample of them. Every rank must call it."""
    chosen = sampled(len(source), sample)
    batches, _ = _part(task, world, source, chosen, _BATCH)
    with task.precision():
        totals = evaluate(task.model, batches)
    _, top1, top5, loss = world.all_reduce(totals).tolist()
    return Accuracy(100 * top1 / len(chosen), 100 * top5 / len(chosen), loss / len(chosen))


def robust_top1(task: Task, world: World, source: Source, test: RobustTest) -> float:
    """Compute the robust accuracy in percent, of the model in eval mode. Every rank must call it."""
    batches, first = _part(task, world, source, sampled(len(source), test.images), _BATCH)
    restarts = 1 if test.autoattack else test.restarts
    with task.precision():
        return _percent(world, count_robust(task.model, batches, test.attack(), restarts=restarts, first=first))


def twin_top1(task: Task, world: World, twins: TwinTest) -> float:
    """Compute the accuracy in percent on twins of training images, as the model sees them in training.

    It is higher than on the images themselves if the network reads the label from the statistics of a batch that was
    attacked as a whole. Chunks are random, as in training: files are often sorted by class. Every rank must call it.
    """
    images = len(task.data.train)
    size = min(twins.chunk_size, images)
    group = size * twins.shuffled
    whole = permutation(images, _SAMPLE_SEED)[: max(min(_TWINS, images) // group, 1) * group]
    batches, first = _part(task, world, task.data.train, whole, size, twins.shuffled)
    with task.precision():
        return _percent(world, count_twin_hits(task.model, batches, twins, task.loss, first))


def sampled(length: int, count: int | None) -> NDArray[np.int64]:
    """Return `count` of the indices below `length`, in order: a random sample with a fixed seed. None: all."""
    if count is None or count >= length:
        return np.arange(length)
    return np.sort(permutation(length, _SAMPLE_SEED)[:count])


def _part(
    task: Task, world: World, source: Source, chosen: NDArray[np.int64], size: int, group: int = 1
) -> tuple[Iterator[Chunk], int]:
    """The batches of chosen images that this rank evaluates, without augmentation, and the number of the first.

    Ranks share whole groups of batches, on which random numbers depend: the result is that of one rank.
    """
    together = size * group
    count = -(-len(chosen) // together)
    first, last = (count * rank // world.size for rank in (world.rank, world.rank + 1))
    own, pin_memory = chosen[first * together : last * together].tolist(), task.device.type == "cuda"
    return evaluation_batches(source, size, task.augment.fit, task.workers, own, pin_memory), first * group


def _percent(world: World, counts: tuple[int, int]) -> float:
    """The share of hits over all ranks, from the hits and images of each."""
    hits, images = world.all_reduce(torch.tensor(counts, dtype=torch.float64, device=world.device)).tolist()
    return float(100 * hits / max(images, 1))  # a rank that is rehearsed without the others may have none


class Showcase:
    """A sink that adds twins and the accuracy by branch to each evaluation of some sinks, on this rank alone."""

    def __init__(self, task: Task, twins: TwinTest, sinks: Sequence[Board]) -> None:
        self._task, self._twins, self._sinks = task, twins, sinks

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add to an evaluation; a step without one is nothing to show."""
        if "test_top1" not in metrics:
            return
        accuracies, picture = branch_top1(self._task), twins_below(self._task, self._twins)
        for sink in self._sinks:
            sink.log(step, accuracies)
            sink.show(step, NAME, picture)


def branch_top1(task: Task) -> dict[str, float]:
    """Return the accuracy in percent on a sample of test images, as they are, through each branch of BatchNorm."""
    found = {}
    for branch in split_layers(task.model)[0].branches:
        with route(task.model, branch, tracking="off"):
            accuracy = evaluate_source(task, World(0, 1, task.device), task.data.test, sample=_SHOWN)
        found[f"{branch}_branch_top1"] = accuracy.top1
    return found


def twins_below(task: Task, twins: TwinTest) -> NDArray[np.uint8]:
    """Return a picture of some training images, their twins below them, and their differences below those."""
    chosen = sampled(len(task.data.train), max(_PAIRS, min(twins.chunk_size, len(task.data.train)))).tolist()
    batches = evaluation_batches(task.data.train, len(chosen), task.augment.fit, task.workers, chosen)
    ((images, labels),) = inputs(task.model, batches)
    with in_mode(task.model, training=True), task.precision():
        changed = twins.attack(task.model, task.loss, images, labels, 0).detach()
    difference = changed - images
    enlarged = 0.5 + 0.5 * difference / difference.abs().max().clamp(min=1e-9)
    return np.concatenate([_row(several) for several in (images, changed, enlarged)])


def _row(images: Tensor) -> NDArray[np.uint8]:
    """The first images side by side, (height, all widths, 3)."""
    some = images[:_PAIRS].float().clamp(0, 1).mul(255).round().byte().cpu()
    row: NDArray[np.uint8] = torch.cat(list(some), dim=2).permute(1, 2, 0).numpy()
    return row if row.shape[2] == 3 else row[:, :, :1].repeat(3, axis=2)
