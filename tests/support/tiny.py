"""A run that takes milliseconds: a small net for the embedded digits, named as a user would name one of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from conadv import split_batchnorm
from conadv.config import Recipe, load_recipe

# 24 images per step in 6 chunks, so that 1, 2, 3 or 6 lanes can share them; 2 steps per epoch, 12 images left out.
FIELDS: dict[str, Any] = {
    "model": "support.tiny:net",
    "precision": "float64",
    "batch_size": 24,
    "chunk_size": 4,
    "epochs": 3,
    "data.train_size": 60,
    "data.augment": "crop-flip",
    "schedule.warmup_epochs": 1,
    "checkpoint.every": 2,
    "threads": 1,
    "timeout": 60,
}


def net(classes: int, in_channels: int) -> nn.Module:
    """Convolutions, BatchNorm and, since what is random must not depend on the layout either, Dropout."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(96, classes),
    )


def tracking(classes: int, in_channels: int) -> nn.Module:
    """A net with a layer that tracks statistics, but is no BatchNorm."""
    return nn.Sequential(nn.InstanceNorm2d(in_channels, track_running_stats=True), *net(classes, in_channels))


class Activated(nn.BatchNorm2d):
    """A BatchNorm with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def split_by_its_author(classes: int, in_channels: int) -> nn.Module:
    return split_batchnorm(nn.Sequential(Activated(in_channels), *net(classes, in_channels)))


def pooled(classes: int, in_channels: int) -> nn.Module:
    """A net for images of any size that computes next to nothing, so that what is in memory is images."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 16, stride=16),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def recipe(**changes: Any) -> Recipe:
    """The recipe of such a run; a double underscore stands for the dot in a key."""
    fields = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("digits", {**FIELDS, **fields})


def words(**changes: Any) -> list[str]:
    """The same as flags of the command line."""
    fields = {**FIELDS, **{key.replace("__", "."): value for key, value in changes.items()}}
    flags = [(f"--{key.replace('_', '-')}", str(value)) for key, value in fields.items()]
    return ["digits", *(word for flag in flags for word in flag)]


def state(run: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint in the folder of a run."""
    return safetensors.torch.load_file(max((run / "checkpoints").glob("step-*")))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are the same, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two states of the same names."""
    assert one.keys() == other.keys()
    return max((float((one[name] - other[name]).abs().max()) for name in one), default=0.0)


class Faulty(nn.Module):
    """The net, until the environment says that this rank is to go wrong in one of its training passes."""

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.net = net(classes, in_channels)
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == int(os.environ["FAULT_PASS"]) and os.environ.get("RANK", "0") == os.environ["FAULT_RANK"]:
            return self._go_wrong(self.net(images))
        return self.net(images)

    def _go_wrong(self, outputs: Tensor) -> Tensor:
        match os.environ["FAULT"]:
            case "value":
                raise ValueError("this image cannot be read")
            case "bug":
                raise KeyError("a bug")
            case "sleep":
                time.sleep(60)
            case "drift":
                weight = next(self.parameters()).data.view(torch.int64)
                weight.flatten()[7] ^= 1 << 24  # one bit, which the rounding of an update does not restore
            case "loss":
                return outputs * float("nan")
            case "gradient":
                return outputs + (outputs - outputs.detach()).abs().sqrt()  # adds 0, whose slope is infinite
        return outputs


def fault(kind: str, rank: int, forward_pass: int) -> dict[str, str]:
    """The environment that makes `support.tiny:Faulty` go wrong."""
    return {"FAULT": kind, "FAULT_RANK": str(rank), "FAULT_PASS": str(forward_pass)}


class Slow(nn.Sequential):
    """The net, with a pause in each training pass, of SLOW_PASS seconds."""

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__(*net(classes, in_channels))

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("SLOW_PASS", "0.01")) * self.training)
        return super().forward(images)
