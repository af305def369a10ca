"""Predict the classes of image files with a trained network, or export it as a program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from conadv.catalog import is_callable
from conadv.core.batch import to_pixels
from conadv.task.data.decode import EXTENSIONS, open_picture
from conadv.task.data.files import read_file
from conadv.task.data.fit import Fit
from conadv.task.data.source import Planes, naming
from conadv.task.libraries import first_line
from conadv.task.models import build_model, evaluating

NETWORK = "network"
"""The key of the facts about the network, as JSON, in the metadata of an export."""
Predictions = dict[str, list[dict[str, Any]]]
"""For each image, by its path, a list of {"class": name, "probability": from 0 to 1}."""
_BATCH = 64  # images


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

    def probabilities(self, images: Planes) -> Tensor:
        """Compute the probability of each class, (N, classes), for images of shape (N, C, H, W)."""
        like = next(self.model.parameters())
        with evaluating(self.model), torch.no_grad():
            pixels = to_pixels(torch.from_numpy(images), like.device, like.dtype)
            logits: Tensor = self.model(pixels)
            return logits.softmax(dim=1).cpu()


def read_export(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read the facts about the network (None: there are none) and the weights from an export."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get(NETWORK, "null"))
        return facts, safetensors.torch.load_file(path)
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError):
        raise ValueError(
            f"{path} is neither a run folder nor an export: pass one that conadv train or conadv export wrote"
        ) from None


def rebuild(source: Path, facts: Any, tensors: dict[str, Tensor], model: str | None, device: torch.device) -> Network:
    """Build the network that a run or an export describes, with its weights.

    Args:
        source: Where the facts and the weights come from, for error messages.
        facts: What `network_facts` of the run returned.
        tensors: The weights of the plain model.
        model: The model, if it is a callable: only the caller may name code to import.
        device: Where to put the network.
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


def as_program(network: Network, facts: Any) -> bytes:
    """Trace the network with torch.export, for any number of images, and return the bytes of a .pt2 file.

    Args:
        network: The network.
        facts: What `network_facts` of the run returned; the file has it as `network.json`.
    """
    like = next(network.model.parameters())
    images = torch.zeros(2, *network.shape, dtype=like.dtype, device=like.device)
    try:
        with evaluating(network.model), torch.no_grad():
            count = torch.export.Dim("images")
            program = torch.export.export(network.model, (images,), dynamic_shapes=({0: count},))
    except Exception as error:  # the model may be the user's, and the tracer fails in many ways
        raise ValueError(f"torch.export cannot trace the model: {first_line(error)}") from error
    file = BytesIO()
    torch.export.save(program, file, extra_files={f"{NETWORK}.json": json.dumps(facts)})
    return file.getvalue()


def find_images(paths: Sequence[Path]) -> list[Path]:
    """List the image files at some paths; those of a folder and its subfolders are sorted by name."""
    found = [image for path in paths for image in (_images_below(path) if path.is_dir() else [path])]
    if not found:
        where = ", ".join(map(str, paths))
        raise ValueError(f"no images in {where}: name image files, or folders of them" if where else "no images given")
    return found


def predict_files(network: Network, paths: Sequence[Path], top: int) -> Predictions:
    """Return the `top` most likely classes of each image file."""
    return {str(path): _likeliest(network, row, top) for path, row in _rows(network, paths)}


def _rows(network: Network, paths: Sequence[Path]) -> Iterator[tuple[Path, Tensor]]:
    for start in range(0, len(paths), _BATCH):
        part = paths[start : start + _BATCH]
        yield from zip(part, network.probabilities(np.stack([network.read(path) for path in part])), strict=True)


def _likeliest(network: Network, probabilities: Tensor, top: int) -> list[dict[str, Any]]:
    values, numbers = probabilities.topk(min(top, len(network.classes)))
    return [
        {"class": network.classes[number], "probability": value}
        for number, value in zip(numbers.tolist(), values.tolist(), strict=True)
    ]


def _images_below(folder: Path) -> list[Path]:
    files = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return sorted(file for file in files if file.suffix[1:].lower() in EXTENSIONS and not file.name.startswith("."))
