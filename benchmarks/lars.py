"""An update by our LARS against torch's SGD and another library's LARS, on the tensors of a whole network.

python benchmarks/lars.py --json
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pytorch_optimizer import LARS
from torch import nn
from torch.optim import SGD, Optimizer

import conadv
from alternate import alternate, arguments, compare, one_core, report
from conadv.task.models import build_model

RATE, MOMENTUM, DECAY = 1e-4, 0.9, 5e-4


def optimizers(model: nn.Module) -> dict[str, Optimizer]:
    return {
        "lars": conadv.Lars(conadv.parameter_groups(model, DECAY), RATE, MOMENTUM),
        "sgd": SGD(model.parameters(), RATE, MOMENTUM, weight_decay=DECAY, foreach=True),
        "pytorch_optimizer": LARS(model.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY),
    }


def restore_gradients(model: nn.Module) -> Callable[[], None]:
    """The same gradients before each update: some optimizers leave others behind."""
    parameters = list(model.parameters())
    originals = [torch.randn_like(parameter) for parameter in parameters]
    gradients = [original.clone() for original in originals]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def restore() -> None:
        torch._foreach_copy_(gradients, originals)

    return restore


def main() -> None:
    given = arguments(__doc__ or "", rounds=75, model="resnet50")
    model = build_model(given.model, 1000, 3, None)
    steps = {name: optimizer.step for name, optimizer in optimizers(model).items()}
    with one_core():
        laps = alternate(steps, given.rounds, restore_gradients(model))
    ratios = [compare(laps, "lars", name) for name in ("sgd", "pytorch_optimizer")]
    report(ratios, given.json, tensors=len(list(model.parameters())))


if __name__ == "__main__":
    main()
