"""Pictures for a report: images, the twins that the attack generates with the trained network, and their difference.

The report is written without PyTorch, so the pictures are made once, here, and saved as gallery.json in the run folder.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from conadv.core.attack import Attack, input_gradient, without_trace
from conadv.core.batch import to_pixels
from conadv.core.catalog import ATTACKS
from conadv.task.data import evaluation_batches
from conadv.task.models import evaluating
from conadv.trainer.build_task import Task
from conadv.trainer.checkpoint import newest_whole
from conadv.trainer.files import write_atomically
from conadv.trainer.state import load_model

from .results import GALLERY, Result

_IMAGES = 6
_LARGEST_SIDE = 96  # pixels: enough for a page, and small enough to embed


def add_galleries(
    folder: Path, results: Iterable[Result], load: Callable[[Path], Task], tell: Callable[[str], None]
) -> None:
    """Write gallery.json for these runs of a study. If one fails, report it with `tell` and skip it."""
    for result in results:
        run = folder / "runs" / result.cell
        try:
            task = load(run)
            load_model(task.model, newest_whole(run / "checkpoints", tell).tensors)
            write_atomically(run / GALLERY, json.dumps(make_gallery(task, result.values)) + "\n")
        except (ValueError, OSError) as problem:
            tell(f"no pictures of {result.name}: {problem}")


def make_gallery(task: Task, values: Mapping[str, Any]) -> dict[str, Any]:
    """Images, twins and differences as base64 PNG, with the predictions of a trained network for images and twins."""
    source = task.data.train
    size = min(int(values["chunk_size"]), len(source))
    raw, labels = next(iter(evaluation_batches(source, size, task.augment.fit, indices=range(size))))
    dtype = next(task.model.parameters()).dtype
    images, labels = to_pixels(raw, task.device, dtype), labels.to(task.device)
    # The whole chunk, as in training: the attack uses the BatchNorm statistics of its chunk.
    twins = generate_twins(task, values, images, labels)
    chosen = _of_different_classes(labels)
    images, twins, labels = images[chosen], twins[chosen], labels[chosen]
    difference = twins - images
    largest = difference.abs().max().item()
    magnified = 0.5 / largest if largest else 1.0
    answers, twin_answers = _answers(task, images), _answers(task, twins)
    names = source.classes
    return {
        "epsilon": values["attack.epsilon"],
        "magnified": magnified,
        "images": [
            {
                "label": names[int(labels[number])],
                "answer": names[answers[number]],
                "twin_answer": names[twin_answers[number]],
                "image": _png(images[number]),
                "twin": _png(twins[number]),
                "perturbation": _png(0.5 + magnified * difference[number]),
            }
            for number in range(len(labels))
        ],
    }


def generate_twins(task: Task, values: Mapping[str, Any], images: Tensor, labels: Tensor) -> Tensor:
    """Twins as the run generates them; those of recycled are one step along the gradient through the main branch."""
    model = task.model
    settings = {key.removeprefix("attack."): value for key, value in values.items() if key.startswith("attack.")}
    attack: Attack = ATTACKS[settings.get("name", "pgd")].build(settings, branch=values.get("twin_branch", "adv"))
    if values["method"] != "recycled":
        return attack(model, task.loss, images, labels)

    def total(images: Tensor) -> Tensor:
        return task.loss(model(images), labels) * len(images)

    gradient = input_gradient(model, total, images, partial(without_trace, model, "main", "batch", 0))
    return attack.along(images, gradient)


def _of_different_classes(labels: Tensor) -> list[int]:
    """Indices of the images to show: the first of each class, then others."""
    classes = labels.tolist()
    first = [number for number, label in enumerate(classes) if label not in classes[:number]]
    rest = [number for number in range(len(classes)) if number not in first]
    return sorted((first + rest)[:_IMAGES])


def _answers(task: Task, images: Tensor) -> list[int]:
    """Predicted classes in evaluation mode."""
    with evaluating(task.model), torch.no_grad():
        answers: list[int] = task.model(images).argmax(1).tolist()
    return answers


def _png(image: Tensor) -> str:
    pixels = (255 * image.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    if pixels.shape[2] not in (1, 3):
        raise ValueError(f"images of {pixels.shape[2]} channels cannot be shown")
    picture = Image.fromarray(np.ascontiguousarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels))
    if max(picture.size) > _LARGEST_SIDE:
        scale = _LARGEST_SIDE / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, Image.Resampling.NEAREST)  # averaging would blur the difference
    with io.BytesIO() as file:
        picture.save(file, "PNG", optimize=True)
        return base64.b64encode(file.getvalue()).decode("ascii")
