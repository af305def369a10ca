"""What is measured: a network, a chunk of random images, and the methods around them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.core.batchnorm.splitbn import split_batchnorm
from conadv.core.catalog import METHODS, is_built_in
from conadv.core.handoff import Handoff
from conadv.core.methods import Method
from conadv.core.pgd import PGD
from conadv.core.roles import ALONE, Place
from conadv.core.seeds import untouched_randomness
from conadv.parallel.collectives import own_device
from conadv.setting import normalise, within
from conadv.task.models import build_model, fastest_memory
from conadv.trainer.memory import check_model

CHANNELS = 3
EPSILON = 4 / 255
Size = Annotated[int, within(1, 1e4)]


@dataclass(frozen=True)
class Workload:
    """Sizes of a benchmark. ResNet-20 with 64 images of 32 × 32 takes a quarter of a second per step on one core."""

    model: str = "resnet20"
    """A network by its name, timm:NAME, torchvision:NAME, or your own as package.module:callable."""
    width: Size | None = None
    """Channels of its first stage. none: its own default."""
    chunk_size: Size = 64
    """Images that a rank learns from in a step."""
    image_size: Size = 32
    """Their height and width in pixels."""
    classes: Size = 10
    """Classes of the network."""

    def __post_init__(self) -> None:
        normalise(self)
        if self.width is not None and not is_built_in(self.model):
            raise ValueError(f"--width is for built-in models, and {self.model!r} is not one: drop it")

    @property
    def shape(self) -> tuple[int, int, int]:
        return CHANNELS, self.image_size, self.image_size

    def build(self, method: str | None = None) -> nn.Module:
        """The network, with the same weights each time, and the BatchNorm branches of a method; None: no branches."""
        with untouched_randomness(torch.device("cpu"), 0):
            build = partial(build_model, self.model, self.classes, CHANNELS, self.width)
            if is_built_in(self.model):
                check_model(build, self.shape, self.chunk_size, itemsize=4)
            model = build()
        if method is not None:
            split_batchnorm(model, METHODS[method].branches)
        return fastest_memory(model, own_device()).to(own_device())

    def batch(self, seed: int = 0, chunks: int = 1) -> tuple[Tensor, Tensor]:
        """Chunks of random bytes, as a data source delivers them, with labels."""
        generator = torch.Generator().manual_seed(seed)
        size = chunks * self.chunk_size
        images = torch.randint(256, (size, *self.shape), dtype=torch.uint8, generator=generator)
        return images, torch.randint(self.classes, (size,), generator=generator)

    def pixels(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """One chunk as the network takes it: floats in [0, 1] on the device."""
        images, labels = self.batch(seed)
        return (images.float() / 255).to(own_device()), labels.to(own_device())

    def method(
        self,
        name: str,
        model: nn.Module,
        *,
        place: Place = ALONE,
        handoff: Handoff | None = None,
        twin_share: str = "1",
    ) -> Method:
        """A method by its name, with its default delay."""
        info = METHODS[name]
        options = {"attack": attack(), "delay": info.default_delay, "handoff": handoff, "twin_share": twin_share}
        method: Method = info.build(model, F.cross_entropy, options, chunk_size=self.chunk_size, seed=0, place=place)
        return method


def attack() -> PGD:
    """One step without a random start, which every library offers, so that all do the same work."""
    return PGD(EPSILON, random_start=0.0)
