"""An update by our LARS against torch's SGD and another library's LARS, on the tensors of a whole network.

python benchmarks/lars.py --json
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from conadv.optim.groups import parameter_groups
from conadv.optim.lars import Lars
from conadv.study.bench.alternate import Tell, alternate
from conadv.study.bench.command import Measurement
from conadv.study.bench.result import Findings, Goal, work_ratio
from conadv.study.bench.workload import Workload
from libraries import absence, load
from scripts import run_workload

_RATE, _MOMENTUM, _DECAY = 1e-4, 0.9, 5e-4


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Time of ours divided by that of the others."""
    model = workload.build()
    optimizers: dict[str, Optimizer] = {
        "lars": Lars(parameter_groups(model, _DECAY), _RATE, _MOMENTUM),
        "sgd": SGD(model.parameters(), _RATE, _MOMENTUM, weight_decay=_DECAY, foreach=True),
    }
    library = load("pytorch_optimizer")
    if library is not None:
        other = library.LARS(model.parameters(), _RATE, momentum=_MOMENTUM, weight_decay=_DECAY)
        optimizers["pytorch_optimizer"] = other
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    laps = alternate(steps, rounds, prepare=restore_gradients(model), tell=tell)
    goals = {"sgd": Goal("≤", 1.0)}
    ratios = [work_ratio(laps, "lars", name, goals.get(name)) for name in optimizers if name != "lars"]
    notes = [f"{workload.model}: {len(list(model.parameters()))} tensors; sgd: torch.optim.SGD(foreach=True)"]
    return Findings(ratios, notes if library is not None else [*notes, absence("pytorch_optimizer")])


def restore_gradients(model: nn.Module) -> Callable[[], None]:
    """The same gradients before each update: some optimizers leave others behind."""
    parameters = list(model.parameters())
    originals = [torch.randn_like(parameter) for parameter in parameters]
    gradients = [original.clone() for original in originals]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient

    def restore() -> None:
        with torch.no_grad():
            torch._foreach_copy_(gradients, originals)

    return restore


if __name__ == "__main__":
    run_workload("lars", Measurement(measure, Workload("resnet50", classes=1000), 75), __doc__)
