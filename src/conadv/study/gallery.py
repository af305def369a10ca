"""Pictures for a report: images, the adversarial twins that a trained network's attack makes, and the difference.

Reports are written without PyTorch, so the pictures are made here, once, and saved as gallery.json in the run folder.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from conadv.core.batch import to_pixels
from conadv.core.catalog import ATTACKS
from conadv.core.pgd import PGD
from conadv.task.data import evaluation_batches
from conadv.task.models import evaluating
from conadv.trainer.build import Task
from conadv.trainer.checkpoint import newest_whole
from conadv.trainer.files import write_atomically
from conadv.trainer.state import load_model

from .results import GALLERY, Result

_IMAGES = 6
_LARGEST_SIDE = 96  # pixels: enough for a page, and small enough to embed


def add_galleries(
    folder: Path, results: Iterable[Result], load: Callable[[Path], Task], tell: Callable[[str], None]
) -> None:
    """Write gallery.json for these runs of a study. A run that fails is reported to `tell` and skipped."""
    for result in results:
        run = folder / "runs" / result.cell
        try:
            task = load(run)
            load_model(task.model, newest_whole(run / "checkpoints", tell).tensors)
            gallery = make_gallery(task, attack_of(result.values), int(result.values["chunk_size"]))
            write_atomically(run / GALLERY, json.dumps(gallery) + "\n")
        except (ValueError, OSError) as problem:
            tell(f"no pictures of {result.name}: {problem}")


def attack_of(values: Mapping[str, Any]) -> PGD:
    """The attack of a run. Recycled attacks through the main branch and starts at the image."""
    settings = {key.removeprefix("attack."): value for key, value in values.items() if key.startswith("attack.")}
    row = ATTACKS[settings.get("name", "pgd")]
    recycled = values["method"] == "recycled"
    attack: PGD = row.build({**settings, "random_start": 0.0}, branch="main") if recycled else row.build(settings)
    return attack


def make_gallery(task: Task, attack: PGD, chunk_size: int) -> dict[str, Any]:
    """Images, twins and differences as base64 PNG, with the predictions for images and twins."""
    source = task.data.train
    size = min(chunk_size, len(source))
    raw, labels = next(iter(evaluation_batches(source, size, task.augment.fit, indices=range(size))))
    dtype = next(task.model.parameters()).dtype
    images, labels = to_pixels(raw, task.device, dtype), labels.to(task.device)
    # The whole chunk, as in training: the attack uses the BatchNorm statistics of its chunk.
    twins = attack(task.model, task.loss, images, labels)
    chosen = _of_different_classes(labels)
    images, twins, labels = images[chosen], twins[chosen], labels[chosen]
    difference = twins - images
    largest = difference.abs().max().item()
    magnified = 0.5 / largest if largest else 1.0
    answers, twin_answers = _answers(task, images), _answers(task, twins)
    names = source.classes
    return {
        "epsilon": attack.epsilon,
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
