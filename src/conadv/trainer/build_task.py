"""Build what a recipe trains: the network with its BatchNorm branches, the data and the loss."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conadv.catalog import METHODS, is_callable
from conadv.config import Recipe
from conadv.core.attack import Loss
from conadv.core.branches import split_layers
from conadv.core.pgd import PGD
from conadv.core.roles import Role
from conadv.core.seeds import untouched_randomness
from conadv.core.splitbn import split_batchnorm
from conadv.machine import usable_cores
from conadv.task.augment import Augmentation, augmentation
from conadv.task.data import DataSet, Share, keep, open_data
from conadv.task.draws import stratified
from conadv.task.libraries import LIBRARY, build_pretrained
from conadv.task.models import build_model, check_output, fastest_memory

from .adversary import HeldOut, RobustTest, TwinTest
from .kernels import compile_model

# Mean and standard deviation of ImageNet, for color images; others stay in [0, 1].
_IMAGENET: dict[str, tuple[float, ...]] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# Images above this height and width, in pixels, are photographs: their network downsamples first.
_SMALL = 64
_KEPT = 1024  # MiB of decoded images that a rank keeps in memory
_WATCH_STEPS = 10  # of PGD on held-out images: it runs during training
DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """A network, its data and its loss: everything that evaluation and export need."""

    model: nn.Module
    data: DataSet
    augment: Augmentation
    loss: Loss
    device: torch.device
    workers: int
    """Threads that prepare images."""
    autocast: torch.dtype | None = None
    """The 16-bit dtype of forward passes, in evaluations too; None: the dtype of the weights."""
    train_sample: int | None = None
    """How many training images to evaluate on; None: all."""
    twins: TwinTest | None = None
    """How the run generates twins; None: it has none."""
    held_out: HeldOut | None = None
    """Training images whose robust accuracy is watched."""


def build_task(recipe: Recipe, device: torch.device, trains: bool = False, data: DataSet | None = None) -> Task:
    """Build the network, the data and the loss.

    Args:
        recipe: What to train or evaluate.
        device: Where to put the network.
        trains: Load weights to start from, and compile, if the recipe says so.
        data: The data; None: open it.
    """
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    data = data or open_task_data(recipe)
    recipe = resolved(recipe, data)
    data, held_out = _hold_out(recipe, data)
    augment = augmentation(recipe.data.augment, recipe.data.image_size, recipe.data.views == "three")
    data = keep(data, augment.fit, _KEPT, train=augment.looks_at_fit)
    with untouched_randomness(device, recipe.seed):
        model, notes = _model(recipe, data, augment, device, trains)
    model.to(device)
    if recipe.compile and trains:
        compile_model(model)
    loss = partial(F.cross_entropy, label_smoothing=recipe.label_smoothing)
    return Task(
        model,
        replace(data, notes=(*data.notes, *notes)),
        augment,
        loss,
        device,
        _workers(recipe, data),
        torch.bfloat16 if recipe.precision == "bfloat16" else None,
        len(data.test),
        twins_of(recipe),
        held_out,
    )


def _hold_out(recipe: Recipe, data: DataSet) -> tuple[DataSet, HeldOut | None]:
    """Take the held-out images from the training images, the same ones in every run."""
    count = recipe.data.held_out
    if not count:
        return data, None
    if count + recipe.batch_size > len(data.train):
        raise ValueError(
            f"data.held_out {count} leaves {max(len(data.train) - count, 0)} training images, less than a batch of "
            f"{recipe.batch_size}: lower --data.held-out or --batch-size"
        )
    chosen = stratified(data.train.labels, len(data.train.classes), count)
    watch = RobustTest(recipe.attack.epsilon, recipe.attack.norm, _WATCH_STEPS, restarts=1)
    held_out, rest = (data.train.take(mask.nonzero()[0].tolist()) for mask in (chosen, ~chosen))
    return replace(data, train=rest), HeldOut(held_out, watch)


def final_test(recipe: Recipe) -> RobustTest | None:
    """Return the robust test at the end of a run; None: the recipe asks for none."""
    attack = recipe.attack
    return RobustTest(attack.epsilon, attack.norm, images=recipe.eval_robust) if recipe.eval_robust else None


def attack_of(recipe: Recipe) -> PGD:
    """Return the attack that generates the twins of a run."""
    return PGD(**asdict(recipe.attack), branch=recipe.twin_branch)


def twins_of(recipe: Recipe) -> TwinTest | None:
    """Return how a run generates twins; None: its method has none."""
    maker = METHODS[recipe.method].maker
    if maker is None:
        return None
    attack = attack_of(recipe)
    if maker == Role.CLEAN:  # one step from the image along the gradient of the clean pass
        attack = replace(attack, branch="main", random_start=0.0)
    return TwinTest(attack, recipe.twin_branch, recipe.chunk_size, recipe.shuffle_twins)


def resolved(recipe: Recipe, data: DataSet) -> Recipe:
    """Replace "auto" in a recipe by the network and the augmentation for the size of the images."""
    large = _photographs(recipe, data)
    model = recipe.model if recipe.model != "auto" else "resnet50" if large else "resnet20"
    augment = recipe.data.augment
    if augment == "auto":
        augment = "resized-crop" if large else "crop-flip"
    return replace(recipe, model=model, data=replace(recipe.data, augment=augment))


def _photographs(recipe: Recipe, data: DataSet) -> bool:
    """Whether the images are large, in which case reading them takes time too."""
    first = data.train.picture(0)
    return (recipe.data.image_size or min(first.height, first.width)) > _SMALL


def _workers(recipe: Recipe, data: DataSet) -> int:
    """How many threads prepare images: what the recipe says, or this rank's share of the cores for photographs."""
    if recipe.data.workers is not None:
        return recipe.data.workers
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine, from torchrun
    return max(1, len(usable_cores()) // ranks) if _photographs(recipe, data) else 0


def open_task_data(recipe: Recipe, share: Share | None = None) -> DataSet:
    """Open the data of a recipe; `share` lets rank 0 list the files for all ranks."""
    data = recipe.data
    return open_data(
        data.name or "path",
        path=data.path,
        train_size=data.train_size,
        image_size=data.image_size,
        channels=data.channels,
        damaged=data.damaged,
        share=share,
    )


def _model(
    recipe: Recipe, data: DataSet, augment: Augmentation, device: torch.device, trains: bool
) -> tuple[nn.Module, list[str]]:
    """Build the network with its branches, in the memory format that is fastest for convolutions; notes about it."""
    classes, shape = len(data.train.classes), augment.shape(data.train)
    pixels = normalization(recipe, shape[0])
    build = partial(build_model, recipe.model, classes, shape[0], recipe.width, pixels.get("mean"), pixels.get("std"))
    model, notes = build(), list[str]()
    if recipe.pretrained and trains:  # otherwise a checkpoint has the weights
        model, note = build_pretrained(build, LIBRARY if recipe.pretrained is True else recipe.pretrained, classes)
        notes.append(note)
    check_output(model, shape, classes)
    main, *adv = METHODS[recipe.method].branches if recipe.twin_branch == "adv" else ("main",)
    views = (main, "aug") if recipe.data.views == "three" else (main,)
    model = _with_branches(model, (*views, *adv))
    model.to(DTYPES[recipe.precision])
    return fastest_memory(model, device), notes


def normalization(recipe: Recipe, channels: int) -> dict[str, tuple[float, ...]]:
    """Return the mean and standard deviation that the network normalizes images with; empty: it takes them as is."""
    return _IMAGENET if channels == 3 and not is_callable(recipe.model) else {}


def network_facts(recipe: Recipe, task: Task) -> dict[str, Any]:
    """Return what a prediction needs besides the weights.

    Args:
        recipe: The recipe, with "auto" resolved.
        task: What it trains.
    """
    shape = task.augment.shape(task.data.train)
    return {
        "method": recipe.method,
        "model": recipe.model,
        "width": recipe.width,
        "classes": list(task.data.train.classes),
        "input": list(shape),
        "zoom": task.augment.fit.zoom,
        **normalization(recipe, shape[0]),
    }


def _with_branches(model: nn.Module, branches: tuple[str, ...]) -> nn.Module:
    """Split the BatchNorm layers of a model, unless its author did so, who may know of custom layers."""
    layers = split_layers(model)
    if not layers:
        return split_batchnorm(model, branches)
    if layers[0].branches != branches:
        raise ValueError(
            f"the model was split into {layers[0].branches}, but this run needs {branches}: split it so, or not at all"
        )
    return model
