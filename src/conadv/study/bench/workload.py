"""What is measured: a network, a chunk of images that look like none, and the methods around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conadv.core.attack import PGD
from conadv.core.batch import Chunk
from conadv.core.handoff import Handoff
from conadv.core.methods import ConAdv, Method, Vanilla
from conadv.core.recycled import Recycled
from conadv.core.roles import ALONE, Place, Role
from conadv.core.seeds import untouched_randomness
from conadv.core.splitbn import split_batchnorm
from conadv.parallel.collectives import own_device
from conadv.task.models import build_from_callable, build_model, fastest_memory

METHODS = ("vanilla", "disadv", "conadv", "recycled")
CHANNELS = 3
EPSILON = 4 / 255


@dataclass(frozen=True)
class Workload:
    """Sizes of a benchmark. ResNet-20 with 64 images of 32 × 32 takes a quarter of a second a step on one core."""

    model: str
    """A built-in model, or package.module:callable."""
    width: int | None = None
    """Channels of its first stage; None: its own default."""
    chunk_size: int = 64
    """Images a chunk: what one rank learns from in a step."""
    image_size: int = 32
    classes: int = 10

    def __post_init__(self) -> None:
        for name in ("chunk_size", "image_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: take at least 1")
        if self.width is not None and ":" in self.model:
            raise ValueError(f"--width is for built-in models, and {self.model!r} is none: drop it")

    @property
    def shape(self) -> tuple[int, int, int]:
        return CHANNELS, self.image_size, self.image_size

    def build(self, method: str | None = None) -> nn.Module:
        """The network, the same each time, with the branches that a method needs; None: as it is."""
        with untouched_randomness(torch.device("cpu"), 0):
            if ":" in self.model:
                model = build_from_callable(self.model, self.classes, CHANNELS)
            else:
                model = build_model(self.model, self.classes, CHANNELS, self.width)
        if method is not None:
            split_batchnorm(model, ("main",) if method == "vanilla" else ("main", "adv"))
        return fastest_memory(model).to(own_device())

    def batch(self, seed: int = 0) -> Chunk:
        """One chunk of random bytes, as data comes from a disk, with labels."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randint(256, (self.chunk_size, *self.shape), dtype=torch.uint8, generator=generator)
        return images, torch.randint(self.classes, (self.chunk_size,), generator=generator)

    def pixels(self, seed: int = 0) -> Chunk:
        """The same chunk as a network takes it."""
        images, labels = self.batch(seed)
        return (images.float() / 255).to(own_device()), labels.to(own_device())

    def method(self, name: str, model: nn.Module, *, place: Place = ALONE, handoff: Handoff | None = None) -> Method:
        options: dict[str, Any] = {"chunk_size": self.chunk_size, "seed": 0, "place": place}
        if name == "vanilla":
            return Vanilla(model, F.cross_entropy, **options)
        options["handoff"] = handoff
        if name == "recycled":
            return Recycled(model, F.cross_entropy, attack(), **options)
        return ConAdv(model, F.cross_entropy, attack(), delay=delay_of(name), **options)


def duties_of(method: str) -> Role:
    """What the ranks of a lane have to do between them."""
    return {"vanilla": Vanilla.duties, "recycled": Recycled.duties}.get(method, ConAdv.duties)


def delay_of(method: str) -> int:
    """How many steps lie between making a twin and learning from it."""
    return {"vanilla": 0, "disadv": 0}.get(method, 1)


def attack() -> PGD:
    """One step from the image itself, as every library has it, so that all do the same work."""
    return PGD(EPSILON, random_start=0.0)
