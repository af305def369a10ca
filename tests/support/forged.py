"""Checkpoints changed on purpose: their digest is right, their content is not what a run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open

from conadv.trainer.checkpoint import _digest


def description(path: Path) -> dict[str, Any]:
    """What a checkpoint has besides its tensors."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["about"])


def describe(path: Path, about: str) -> None:
    """Give a checkpoint another description, with the right digest."""
    tensors = safetensors.torch.load(path.read_bytes())
    path.write_bytes(safetensors.torch.save(tensors, {"about": about, "digest": _digest(tensors, about)}))


def forge(path: Path, **changes: Any) -> None:
    """Change fields of the description."""
    describe(path, json.dumps({**description(path), **changes}))
