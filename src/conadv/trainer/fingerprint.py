"""What all ranks must have in common besides flags: data, and software."""

from __future__ import annotations

import platform
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from conadv import __version__
from conadv.task.data import DataSet, Source

# How many images and file names are compared. All would take minutes, and another decoder changes every image.
_SAMPLES = 4
_NAMES = 1000


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"conadv": __version__, "torch": torch.__version__, "python": platform.python_version()}


def data_facts(data: DataSet, path: str | None) -> dict[str, Any]:
    """Return classes and sizes of a data set, and digests of labels, some file names and some pixels.

    Args:
        data: The data set.
        path: Its folder, which may differ between machines and is removed from file names.
    """
    facts: dict[str, Any] = {"classes": list(data.train.classes)}
    for part, source in (("training", data.train), ("test", data.test)):
        named, seen = (range(0, len(source), max(1, len(source) // count)) for count in (_NAMES, _SAMPLES))
        names = [source.name(index).removeprefix(path or "").lstrip("/") for index in named]
        facts[f"{part} images"] = len(source)
        facts[f"{part} labels"] = _digest(np.ascontiguousarray(source.labels).tobytes())
        facts[f"{part} names"] = _digest("\n".join(names).encode())
        facts[f"{part} pixels"] = _digest(*(_pixels(source, index) for index in seen))
    return facts


def software_facts(model: nn.Module) -> dict[str, Any]:
    """Return versions, a digest of our source code, and one of the names, shapes and dtypes of the model's tensors."""
    tensors = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()]
    source = _digest(*(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))))
    return {**versions(), "source": source, "model": _digest("\n".join(tensors).encode())}


def _pixels(source: Source, index: int) -> bytes:
    try:
        return source.image(index).tobytes()
    except (ValueError, OSError):  # reported by the step that needs the image
        return b"damaged"


def _digest(*parts: bytes) -> str:
    return sha256(b"".join(len(part).to_bytes(8) + part for part in parts)).hexdigest()[:12]
