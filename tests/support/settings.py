"""One table of small settings: every method that there is, and models on which a step takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, Recycled, Sam, Vanilla
from conadv.catalog import METHODS
from conadv.core.step import Losses

CLASSES = 5
RHO = 0.3
Method = Vanilla | ConAdv | Recycled | Sam


@dataclass(frozen=True)
class Setting:
    """A method as one would ask for it on the command line."""

    name: str
    method: str
    delay: int = 1

    @property
    def adversarial(self) -> bool:
        return METHODS[self.method].branches == ("main", "adv")

    def make(self, model: nn.Module, attack: PGD | None = None, **options: Any) -> Method:
        """The method around a model that has the branches it needs."""
        own = {"attack": attack or PGD(8 / 255, random_start=0), "delay": self.delay, "rho": RHO}
        own |= {"adv_weight": options.pop("adv_weight", 0.5), "shuffle_twins": options.pop("shuffle_twins", 1)}
        place = options.pop("place", None)
        method = METHODS[self.method].build(model, F.cross_entropy, own, **options)
        if place is not None:
            method._step.join(place)
        return method


SETTINGS = (
    Setting("vanilla", "vanilla"),
    Setting("disadv", "conadv", delay=0),
    Setting("conadv", "conadv"),
    Setting("conadv-2", "conadv", delay=2),
    Setting("conadv-3", "conadv", delay=3),
    Setting("recycled", "recycled"),
    Setting("sam", "sam", delay=0),
)


def train(method: Method, model: nn.Module, batches: Any, lr: float = 0.1, momentum: float = 0.0) -> list[Losses]:
    """A training loop as people write it; the losses of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum)
    losses = []
    for now, ahead in method.feed(batches):
        optimizer.zero_grad()
        losses.append(method(now, ahead))
        optimizer.step()
    return losses


every_method = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
# With twins that are the images, all of these take the step of a plain loop.
image_methods = pytest.mark.parametrize(
    "setting", [setting for setting in SETTINGS if setting.method != "sam"], ids=lambda setting: setting.name
)
adversarial_methods = pytest.mark.parametrize(
    "setting", [setting for setting in SETTINGS if setting.adversarial], ids=lambda setting: setting.name
)


def small_cnn(seed: int = 0, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, channels: int = 2) -> nn.Sequential:
    """A convolutional net in float64 for images of 6 × 6, whose BatchNorm layers have weights that are not 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1, bias=False),
            norm(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
            norm(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, CLASSES),
        ).double()
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.uniform_(layer.bias, -0.5, 0.5)
    return model


def small_batches(count: int, size: int = 8, seed: int = 1, channels: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Batches of images in [0, 1], in float64, with their labels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.rand(size, channels, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for _ in range(count)
    ]
