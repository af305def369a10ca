"""Evaluation of a model on all ranks: accuracy as it is, on twins, and under attack; and the best weights of a run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from conadv.core.attack import Attack, Loss
from conadv.core.pgd import PGD, Norm
from conadv.core.seeds import untouched_randomness
from conadv.core.splitbn import plain_state_dict
from conadv.ranks.world import World
from conadv.task.data import Source
from conadv.task.draws import permutation
from conadv.task.evaluate import Adversary, Evaluation, count_robust, count_twin_hits, evaluate
from conadv.task.stream import evaluation_batches

from .checkpoint import Checkpoint, read_state, write_state

if TYPE_CHECKING:
    from .build import Task

BEST = "best.safetensors"
# The first of these that an evaluation has decides which weights are the best ones.
BEST_BY = ("held_out_robust_top1", "test_top1")
_COLLAPSE = 0.5  # of the best robust accuracy
_WATCH_STEPS = 10  # of PGD on held-out images: it runs during training
_BATCH = 256
# Seed of the sample of training images: the same in every run, so that runs can be compared.
_SAMPLE_SEED = 14
_TWINS = 1000  # training images, about, whose twins are evaluated


@dataclass(frozen=True)
class RobustTest:
    """How to measure robust accuracy: the share of images that stay correctly classified under every attack."""

    epsilon: float
    norm: Norm = "linf"
    steps: int = 20
    """Steps of PGD."""
    restarts: int = 2
    """How often PGD starts, at another random point each time."""
    images: int | None = None
    """How many images to attack, a fixed sample; None: all."""
    autoattack: bool = False
    """AutoAttack, once, instead of PGD."""

    def attack(self) -> Adversary:
        if self.autoattack:
            return AutoAttack(self.epsilon, self.norm)
        return robust_attack(self.epsilon, self.steps, norm=self.norm)


@dataclass(frozen=True)
class AutoAttack:
    """The standard ensemble of Croce and Hein (2020), by their own code: APGD-CE, APGD-T, FAB-T and Square."""

    epsilon: float
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if importlib.util.find_spec("pyautoattack") is None:
            raise ValueError("AutoAttack is not installed: pip install 'conadv[robust]'")

    def __call__(self, model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, seed: int = 0) -> Tensor:
        """Change the images within epsilon; `loss` is not used, since each of its attacks has its own."""
        import pyautoattack

        classes = model(images[:1]).shape[1]
        if classes < 4:
            raise ValueError(f"AutoAttack needs at least 4 classes, and this model has {classes}: use PGD")
        norm = {"linf": "Linf", "l2": "L2"}[self.norm]
        with untouched_randomness(images.device, seed):
            attack = pyautoattack.AutoAttack(
                model, norm=norm, eps=self.epsilon, seed=seed % 2**31, device=images.device
            )
            attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
            changed: Tensor = attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]
        return changed


def robust_attack(epsilon: float, steps: int, branch: str = "main", norm: Norm = "linf") -> PGD:
    """Return PGD within `epsilon`, with a step size large enough to cross the ball and come back."""
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    return PGD(epsilon, size, steps, norm, random_start=1.0, branch=branch, statistics="running")


@dataclass(frozen=True)
class TwinTest:
    """How a run generates twins, and groups and routes them when it learns from them."""

    attack: Attack
    branch: str
    chunk_size: int
    shuffled: int = 1
    """The twins of this many chunks are shuffled before they are learnt."""


def evaluate_task(task: Task, world: World, robust: RobustTest | None = None) -> dict[str, float]:
    """Return the metrics of a model for its summary: accuracy in percent on test and training images, and the gap.

    `adv_top1` is the accuracy on twins of training images, see `twin_top1`. Every rank must call it.

    Args:
        task: the model, its data and its settings.
        world: the ranks.
        robust: also compute the robust accuracy on test images.
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


def evaluate_source(task: Task, world: World, source: Source, sample: int | None = None) -> Evaluation:
    """Compute accuracy and loss on the images of a source, without augmentation; ranks share the images.

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
    chosen, first = _part(world, sampled(len(source), test.images), _BATCH)
    restarts = 1 if test.autoattack else test.restarts
    batches = evaluation_batches(source, _BATCH, task.augment.fit, task.workers, chosen)
    return _percent(
        world, count_robust(task.model, batches, test.attack(), restarts=restarts, first=first, autocast=task.autocast)
    )


def twin_top1(task: Task, world: World, twins: TwinTest) -> float:
    """Compute the accuracy in percent on twins of training images, as the model sees them in training.

    It is higher than on the images themselves if the network reads the label from the statistics of a batch that was
    attacked as a whole. Chunks are random, as in training: files are often sorted by class. Every rank must call it.
    """
    images = len(task.data.train)
    size = min(twins.chunk_size, images)
    group = size * twins.shuffled
    whole = permutation(images, _SAMPLE_SEED)[: max(min(_TWINS, images) // group, 1) * group]
    chosen, first = _part(world, whole, group)
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


def _part(world: World, chosen: NDArray[np.int64], size: int) -> tuple[list[int], int]:
    """The indices in the batches of `size` that this rank evaluates, and the number of its first batch."""
    count = math.ceil(len(chosen) / size)
    first, last = (count * rank // world.size for rank in (world.rank, world.rank + 1))
    return chosen[first * size : last * size].tolist(), first


def _percent(world: World, counts: tuple[int, int]) -> float:
    """The share of hits over all ranks, from the hits and images of each."""
    hits, images = world.all_reduce(torch.tensor(counts, dtype=torch.float64, device=world.device)).tolist()
    return float(100 * hits / images) if images else math.nan  # fewer images than ranks


def sampled(length: int, count: int | None) -> NDArray[np.int64]:
    """Return `count` of the indices below `length`, in order: a random sample with a fixed seed. None: all."""
    if count is None or count >= length:
        return np.arange(length)
    return np.sort(permutation(length, _SAMPLE_SEED)[:count])


class BestWeights:
    """A sink that keeps the weights of the best evaluation: robust accuracy on held-out images, or test accuracy.

    Robust training with few steps may collapse within an epoch (catastrophic overfitting): the accuracy under a weak
    attack still rises, and that under a strong one falls to zero.

    Args:
        folder: of the run; weights of an earlier part of the run are found there.
        model: the network, split or not.
        say: prints a line.
    """

    def __init__(self, folder: Path, model: nn.Module, say: Callable[[str], None]) -> None:
        self._path = folder / BEST
        self._model, self._say = model, say
        self._best = read_best(self._path).about if self._path.exists() else None
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of an evaluation; a step without one changes nothing."""
        metric = next((name for name in BEST_BY if name in metrics), None)
        if metric is None:
            return
        accuracy = float(metrics[metric])
        if self._best is None or accuracy > self._best[metric]:
            self._best = {"step": step, metric: accuracy}
            tensors = {name: one.cpu().contiguous() for name, one in plain_state_dict(self._model).items()}
            write_state(self._path, Checkpoint(tensors, self._best))
        elif metric == BEST_BY[0] and accuracy < _COLLAPSE * self._best[metric] and not self._warned:
            self._warned = True
            self._say(
                f"robust accuracy on the held-out images fell from {self._best[metric]:.1f} % (step "
                f"{self._best['step']}) to {accuracy:.1f} %, which is catastrophic overfitting: those weights "
                f"are in {self._path}; try more --attack.steps or a smaller --attack.step-size"
            )

    def close(self) -> None:
        pass


def read_best(path: Path) -> Checkpoint:
    """Return the weights in best.safetensors, by the names of the plain model, with their step and accuracy."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; a run with --eval-every writes it")
    try:
        return read_state(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}: remove it") from None
