"""The time of a step: each method against vanilla, and vanilla against the plainest PyTorch loop.

    python benchmarks/step.py --width 32 --chunk-size 128 --rounds 20

All candidates learn from the same images, with an optimizer whose learning rate is 0, so that every round does the
same work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import conadv
from alternate import alternate, arguments, compare, one_core, report
from conadv.task.models import build_model

Step = Callable[[], object]
# One step without a random start, which every library offers, so that all do the same work.
ATTACK = conadv.PGD(4 / 255, random_start=0.0)
METHODS: dict[str, Callable[..., conadv.Method]] = {
    "vanilla": lambda model, loss: conadv.Vanilla(model, loss),
    "disadv": lambda model, loss: conadv.ConAdv(model, loss, ATTACK, delay=0),
    "conadv": lambda model, loss: conadv.ConAdv(model, loss, ATTACK, delay=1),
    "recycled": lambda model, loss: conadv.Recycled(model, loss, ATTACK),
    "sam": lambda model, loss: conadv.Sam(model, loss),
}


def network(model: str, width: int) -> nn.Module:
    """The network, with the same weights each time."""
    torch.manual_seed(0)
    return build_model(model, 10, 3, width).to(memory_format=torch.channels_last)


def chunk(size: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Random images in [0, 1] and labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(size, 3, pixels, pixels, generator=generator), torch.randint(10, (size,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=5e-4)


def plain_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """The loop without this library."""
    optimizer, (images, labels) = sgd(model), batch

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def method_step(name: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """The loop with this library."""
    model = conadv.split_batchnorm(model)
    method, optimizer = METHODS[name](model, F.cross_entropy), sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        method(batch)
        optimizer.step()

    return step


def flops(step: Step) -> int:
    """FLOPs of convolutions and matrix products, which are nearly all."""
    step()  # the first step of some methods is another
    step()
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def main() -> None:
    given = arguments(__doc__ or "", rounds=10, model="resnet20", width=16, chunk_size=64, image_size=32)
    batch = chunk(given.chunk_size, given.image_size)
    steps = {name: method_step(name, network(given.model, given.width), batch) for name in METHODS}
    work = {name: flops(step) for name, step in steps.items()}
    steps["plain"] = plain_step(network(given.model, given.width), batch)
    with one_core():
        laps = alternate(steps, given.rounds)
    ratios = [compare(laps, "vanilla", "plain")]
    ratios += [compare(laps, name, "vanilla") for name in METHODS if name != "vanilla"]
    by_flops = {f"{name} by FLOPs": round(count / work["vanilla"], 3) for name, count in work.items()}
    report(ratios, given.json, chunk=given.chunk_size, **by_flops)


if __name__ == "__main__":
    main()
