"""What is done with a trained run or an export: evaluate it, export its weights or network, predict with it."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from conadv.atomic import write_output
from conadv.catalog import is_callable
from conadv.config import Recipe, check_run_folder
from conadv.core.batch import to_pixels
from conadv.core.state import below
from conadv.ranks.world import World, own_device
from conadv.task.data.decode import open_picture
from conadv.task.data.files import images_below, read_file
from conadv.task.data.fit import Fit
from conadv.task.data.source import Planes, naming
from conadv.task.evaluate import RobustTest
from conadv.task.libraries import first_line
from conadv.task.models import build_model, in_mode
from conadv.trainer.build import build_task
from conadv.trainer.checkpoint import BEST, newest_whole, read_best
from conadv.trainer.evaluation import evaluate_task
from conadv.trainer.folder import resume_command
from conadv.trainer.kernels import kernels
from conadv.trainer.progress import tell
from conadv.trainer.train import find_checkpoint, run_facts

NETWORK = "network"
"""The key of the facts about the network, as JSON, in the metadata of an export."""
Predictions = dict[str, list[dict[str, Any]]]
"""For each image, by its path, a list of {"class": name, "probability": from 0 to 1}."""
_BATCH = 64  # images


def evaluate(recipe: Recipe, folder: Path, robust: RobustTest | None, best: bool = False) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run, or its best weights, also under attack if `robust` says how."""
    task = build_task(recipe, own_device())
    checkpoint = find_checkpoint(folder, task)
    if checkpoint is None:
        command = resume_command(folder, recipe.model, recipe.data.path)
        raise ValueError(f"{folder} has no checkpoint yet: train it further with {command}")
    task.model.load_state_dict(below("model.", checkpoint.tensors))
    position = checkpoint.about["position"]
    about = {key: position[key] for key in ("layout", "world_size", "steps")}  # its times are those of the training
    if best:
        found = read_best(folder / BEST)
        task.model.load_state_dict(found.tensors)
        about["best_step"] = found.about["step"]
    with kernels(task.device, recipe.deterministic):
        metrics = evaluate_task(task, World(0, 1, task.device), robust)
    if best:
        metrics.pop("adv_top1", None)  # the best weights are those of the main branch only
    return {**run_facts(task), **about, **metrics}


def export(folder: Path, out: Path, form: str = "safetensors", model: str | None = None) -> dict[str, Any]:
    """Export the newest checkpoint of a run for the ordinary model, without adversarial branches, to a file.

    Its form is "safetensors" (weights), or "torch-export" or "onnx" (the network with its weights). If the model is a
    callable, `model` has to name it: code is never imported because a file names it.
    """
    facts, tensors, step = _plain_weights(folder)
    if form == "safetensors":
        data = safetensors.torch.save(tensors, {NETWORK: json.dumps(facts)})
    else:
        network = rebuild(folder, facts, tensors, model, torch.device("cpu"))
        data = as_program(network, facts, onnx=form == "onnx")
    write_output(out, data)
    return {"file": str(out), "tensors": len(tensors), "step": step}


def predict(source: Path, images: Sequence[Path], top: int, model: str | None = None) -> tuple[Predictions, list[str]]:
    """Predict the classes of image files, and of those in folders, by the newest checkpoint of a run or by an export.

    Returns:
        The `top` most likely classes of each image, by its path; and a line about each file that cannot be read.
    """
    facts, tensors, _ = _plain_weights(source) if source.is_dir() else (*read_export(source), None)
    network = rebuild(source, facts, tensors, model, own_device())
    found = [Path(image) for path in images for image in (images_below(path) if path.is_dir() else [path])]
    if not found:
        where = ", ".join(map(str, images))
        raise ValueError(f"no images in {where}: name image files, or folders of them" if where else "no images given")
    predictions: Predictions = {}
    problems: list[str] = []
    for start in range(0, len(found), _BATCH):
        planes = {}
        for path in found[start : start + _BATCH]:
            try:
                planes[str(path)] = network.read(path)
            except ValueError as problem:
                problems.append(str(problem))
        if planes:
            likeliest = network.likeliest(np.stack(list(planes.values())), top)
            predictions |= dict(zip(planes, likeliest, strict=True))
    if not predictions:
        raise ValueError(problems[0])
    return predictions, problems


def _plain_weights(folder: Path) -> tuple[Any, dict[str, Tensor], int]:
    """Return the facts about the network of a run, its newest weights for the plain model, and their step."""
    check_run_folder(folder)
    newest = newest_whole(folder / "checkpoints", tell)
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint yet: train it further with conadv train --resume {folder}")
    tensors, about = newest
    return about.get("network"), {name: tensors[f"model.{name}"] for name in about["plain"]}, about["step"]


@dataclass(frozen=True)
class Network:
    """A trained network, and what it takes and returns."""

    model: nn.Module
    classes: Sequence[str]
    shape: tuple[int, int, int]
    """Channels, height and width of its input."""
    zoom: float
    """How much larger than the input an image is resized before its centre is cropped."""

    def read(self, path: Path) -> Planes:
        """Read an image file as evaluation does, as (C, H, W) bytes."""
        channels, height, width = self.shape
        with naming(path):
            picture = open_picture(read_file(path), channels, str(path))
            planes = Fit(height if height == width else None, self.zoom)(picture)
        if planes.shape != self.shape:
            raise ValueError(
                f"{path} has {picture.width} × {picture.height} pixels, and the network takes {width} × {height}: "
                "resize the image"
            )
        return planes

    def likeliest(self, images: Planes, top: int) -> list[list[dict[str, Any]]]:
        """Return the `top` classes with the largest probabilities, for each of some images, (N, C, H, W)."""
        like = next(self.model.parameters())
        with in_mode(self.model, training=False), torch.no_grad():
            logits: Tensor = self.model(to_pixels(torch.from_numpy(images), like.device, like.dtype))
        values, numbers = logits.softmax(dim=1).cpu().topk(min(top, len(self.classes)))
        return [
            [{"class": self.classes[number], "probability": value} for number, value in zip(*row, strict=True)]
            for row in zip(numbers.tolist(), values.tolist(), strict=True)
        ]


def read_export(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read the facts about the network (None: there are none) and the weights from an export or best.safetensors."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        facts = json.loads(metadata.get(NETWORK, "null")) or json.loads(metadata.get("about", "{}")).get(NETWORK)
        return facts, safetensors.torch.load_file(path)
    except (OSError, ValueError, AttributeError, RecursionError, safetensors.SafetensorError):
        raise ValueError(
            f"{path} is neither a run folder nor a safetensors export: pass what conadv train or conadv export wrote"
        ) from None


def rebuild(source: Path, facts: Any, tensors: dict[str, Tensor], model: str | None, device: torch.device) -> Network:
    """Build the network that a run or an export (the `source`) describes, with the weights of the plain model.

    The facts are those of `network_facts`. If the model is a callable, `model` names the code to import.
    """
    match facts:
        case {
            "model": str(name),
            "width": None | int() as width,
            "classes": [str(), *_] as classes,
            "input": [1 | 3 as channels, int(height), int(side)],
            "zoom": int() | float() as zoom,
        }:
            pass
        case {"input": [int(channels), *_]} if channels not in (1, 3):
            raise ValueError(f"{source} takes images of {channels} channels, and image files have 1 or 3")
        case _:
            raise ValueError(f"{source} does not say how its network was built: it was written by another version")
    if is_callable(name) and model is None:
        raise ValueError(f"{source} names code to import, which a file may not: if you trust it, pass --model {name!r}")
    built = build_model(model or name, len(classes), channels, width, facts.get("mean"), facts.get("std"))
    # A run with float64 has such weights, and loading them into float32 would round them.
    built.to(device, next((one.dtype for one in tensors.values() if one.is_floating_point()), torch.float32))
    try:
        built.load_state_dict(tensors)
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:200]
        raise ValueError(f"the weights of {source} do not fit the model {model or name}: {problem}") from None
    return Network(built, classes, (channels, height, side), float(zoom))


def as_program(network: Network, facts: Any, onnx: bool) -> bytes:
    """Trace the network with torch.export, for any number of images in [0, 1]: the bytes of a .pt2 or .onnx file.

    A .pt2 file has the facts as `network.json`, ONNX in its metadata. ONNX is in float32: runtimes have few kernels for
    float64.
    """
    if onnx and not (find_spec("onnx") and find_spec("onnxscript")):
        raise ValueError("--format onnx needs the packages onnx and onnxscript: pip install 'conadv[onnx]'")
    model = network.model.float() if onnx else network.model
    like = next(model.parameters())
    images = torch.zeros(2, *network.shape, dtype=like.dtype, device=like.device)
    try:
        with in_mode(model, training=False), torch.no_grad(), _quietly():
            program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("images")},))
            if onnx:
                made = torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["logits"])
    except Exception as error:  # the model may be the user's, and the tracer fails in many ways
        raise ValueError(f"torch.export cannot trace the model: {first_line(error)}") from error
    if onnx:
        assert made is not None
        made.model.metadata_props[NETWORK] = json.dumps(facts)
        data: bytes = made.model_proto.SerializeToString()
        return data
    file = BytesIO()
    torch.export.save(program, file, extra_files={f"{NETWORK}.json": json.dumps(facts)})
    return file.getvalue()


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the notes and warnings of PyTorch's exporters, which are about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
