"""What TensorBoard and Weights & Biases show at each evaluation besides metrics: twins, and the accuracy by branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conadv.core.batch import to_pixels
from conadv.core.branches import split_layers
from conadv.core.splitbn import routed
from conadv.sinks import Board
from conadv.task.evaluate import evaluate
from conadv.task.models import in_mode
from conadv.task.stream import evaluation_batches

from .build import Task
from .evaluation import TwinTest, sampled

_PAIRS = 8
_IMAGES = 1000  # test images whose accuracy by branch is computed
NAME = "images_twins_differences"  # the differences are enlarged


class Showcase:
    """A sink that adds to each evaluation, on this rank alone.

    Args:
        task: the network and its data.
        twins: how the run generates twins.
        sinks: where it goes.
    """

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

    def close(self) -> None:
        pass


def branch_top1(task: Task) -> dict[str, float]:
    """Return the accuracy in percent on a sample of test images, as they are, through each branch of BatchNorm."""
    chosen = sampled(len(task.data.test), _IMAGES).tolist()
    found = {}
    for branch in split_layers(task.model)[0].branches:
        batches = evaluation_batches(task.data.test, 250, task.augment.fit, task.workers, chosen)
        with routed(task.model, branch, tracking="off"):
            found[f"{branch}_branch_top1"] = evaluate(task.model, batches, autocast=task.autocast).top1
    return found


def twins_below(task: Task, twins: TwinTest) -> NDArray[np.uint8]:
    """Return a picture of some training images, their twins below them, and their differences below those."""
    chosen = sampled(len(task.data.train), max(_PAIRS, min(twins.chunk_size, len(task.data.train)))).tolist()
    (raw, labels, *_), *_ = evaluation_batches(task.data.train, len(chosen), task.augment.fit, task.workers, chosen)
    like = next(task.model.parameters())
    images = to_pixels(raw, like.device, like.dtype).to(like.dtype)
    precision = nullcontext() if task.autocast is None else torch.autocast(like.device.type, task.autocast)
    with in_mode(task.model, training=True), precision:
        changed = twins.attack(task.model, task.loss, images, labels.long().to(like.device), 0).detach()
    difference = changed - images
    enlarged = 0.5 + 0.5 * difference / difference.abs().max().clamp(min=1e-9)
    return np.concatenate([_row(several) for several in (images, changed, enlarged)])


def _row(images: Tensor) -> NDArray[np.uint8]:
    """The first images side by side, (height, all widths, 3)."""
    some = images[:_PAIRS].float().clamp(0, 1).mul(255).round().byte().cpu()
    row: NDArray[np.uint8] = torch.cat(list(some), dim=2).permute(1, 2, 0).numpy()
    return row if row.shape[2] == 3 else row[:, :, :1].repeat(3, axis=2)
