"""Evaluate and export a trained run, and predict with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from conadv import bf16
from conadv.atomic import replace_file
from conadv.catalog import METHODS
from conadv.config import RESUMABLE, Recipe, check_run_folder, flatten
from conadv.optim import build_optimizer
from conadv.ranks.world import World, own_device

from .adversary import RobustTest
from .best import FILE as BEST
from .best import read_best
from .build_task import Task, build_task, resolved
from .checkpoint import Checkpoint, newest_whole
from .evaluation import evaluate_task
from .folder import resume_command
from .kernels import kernels
from .predict import NETWORK, Predictions, as_program, predict_files, read_export, rebuild
from .progress import tell
from .resume import Expected, find_checkpoint
from .state import expected_tensors, fill_state, load_model

# Progress of a run in a checkpoint, in the order of a summary.
_POSITION = ("layout", "world_size", "steps", "seconds", "images_per_second")


def evaluate(recipe: Recipe, folder: Path, robust: RobustTest | None, best: bool = False) -> dict[str, Any]:
    """Evaluate the weights of a run.

    Args:
        recipe: The recipe of the run.
        folder: The folder of the run.
        robust: How to measure robust accuracy; None: not at all.
        best: Evaluate the weights of the best evaluation during the run, not the newest checkpoint.
    """
    task, checkpoint = _trained(recipe, folder)
    about = {key: checkpoint.about["position"][key] for key in _POSITION if key in checkpoint.about["position"]}
    if best:
        of_best, weights = read_best(folder / BEST)
        task.model.load_state_dict(weights)
        about["best_step"] = of_best["step"]
    with kernels(task.device, recipe.deterministic):
        metrics = evaluate_task(task, World(0, 1, task.device), robust)
    return {**facts(resolved(recipe, task.data)), **about, **metrics}


def export(folder: Path, out: Path, form: str = "safetensors", model: str | None = None) -> dict[str, Any]:
    """Export the newest checkpoint of a run for the ordinary model, without adversarial branches.

    Args:
        folder: The folder of the run.
        out: The file to write.
        form: Weights as "safetensors", or the network with its weights as "torch-export" or "onnx".
        model: The model, if it is a callable: code is never imported because a file names it.
    """
    checkpoint, tensors = _plain_weights(folder)
    facts = checkpoint.about.get("network")
    if form == "safetensors":
        data = safetensors.torch.save(tensors, {NETWORK: json.dumps(facts)})
    else:
        network = rebuild(folder, facts, tensors, model, torch.device("cpu"))
        data = as_program(network, facts, onnx=form == "onnx")
    try:
        replace_file(out, data)
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror or error}): name another file") from None
    return {"file": str(out), "tensors": len(tensors), "step": checkpoint.about["step"]}


def predict(source: Path, images: Sequence[Path], top: int, model: str | None = None) -> Predictions:
    """Predict the classes of image files.

    Args:
        source: The folder of a run, whose newest checkpoint is used, or a file that `export` wrote.
        images: Image files, and folders of them.
        top: How many classes to return per image, the most likely ones first.
        model: The model, if it is a callable: code is never imported because a file names it.

    Returns:
        The most likely classes of each image, by its path.
    """
    if source.is_dir():
        checkpoint, tensors = _plain_weights(source)
        facts = checkpoint.about.get("network")
    else:
        facts, tensors = read_export(source)
    return predict_files(rebuild(source, facts, tensors, model, own_device()), images, top)


def expected(recipe: Recipe, task: Task) -> Expected:
    """Return what a checkpoint of a run must match."""
    decisive = {key: value for key, value in flatten(recipe).items() if key not in RESUMABLE}
    optimizer = build_optimizer(task.model, asdict(recipe.optimizer))
    fill_state(optimizer)
    tensors = expected_tensors(task.model, optimizer, recipe.delay)
    return Expected(tensors, decisive, flatten(Recipe()))


def facts(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe that a summary contains; epsilon is None for a method without attack."""
    names = ("method", "delay", "model", "batch_size", "chunk_size", "epochs", "seed")
    attacks = METHODS[recipe.method].maker is not None
    return {**{name: getattr(recipe, name) for name in names}, "epsilon": recipe.attack.epsilon if attacks else None}


def _trained(recipe: Recipe, folder: Path) -> tuple[Task, Checkpoint]:
    """Load the newest checkpoint: the task with its weights."""
    device = own_device()
    if recipe.precision == "bfloat16" and device.type == "cpu" and (note := bf16.prepare()):
        tell(note)
    task = build_task(recipe, device)
    checkpoint = find_checkpoint(folder, expected(recipe, task), tell)
    if checkpoint is None:
        command = resume_command(folder, recipe.model, recipe.data.path)
        raise ValueError(f"{folder} has no checkpoint yet: train it further with {command}")
    load_model(task.model, checkpoint.tensors)
    return task, checkpoint


def _plain_weights(folder: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return the newest checkpoint of a run, and its weights for the plain model."""
    check_run_folder(folder)
    checkpoint = newest_whole(folder / "checkpoints", tell, _check_plain)
    return checkpoint, {name: checkpoint.tensors[f"model.{name}"] for name in checkpoint.about["plain"]}


def _check_plain(checkpoint: Checkpoint) -> None:
    missing = [name for name in checkpoint.about["plain"] if f"model.{name}" not in checkpoint.tensors]
    if missing:
        raise ValueError(f"lacks the tensor model.{missing[0]}")
