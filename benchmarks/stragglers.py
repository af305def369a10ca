"""What an attack rank that is late now and then costs, by the delay, in "clean | adv | attack" on 3 ranks.

python benchmarks/stragglers.py --slow 0.5 --every 4 --json

The passes of the network sleep instead of computing, so that three ranks need not have three cores: a forward pass
takes one unit, the gradients of the activations one, those of the weights one. An undisturbed step so takes three
units, and the attack two of them.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from cyclopts import Parameter
from torch import Tensor, nn

import conadv
from conadv.core.roles import Role
from conadv.parallel.collectives import World
from conadv.study.bench.alternate import Tell, progress, silent
from conadv.study.bench.command import Measurement, report
from conadv.study.bench.layout import ratio
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.result import Findings
from conadv.study.bench.workload import Workload
from scripts import run_script

RANKS = 3
DELAYS = (1, 2, 4)
UNIT = 0.02
"""Seconds of a pass."""
_STEPS, _UNTIMED = 16, 4
_SLOW, _EVERY = "CONADV_SLOW", "CONADV_SLOW_EVERY"


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Time of a step with a late attack rank, divided by that of an undisturbed one, for each delay."""
    (found,) = run_ranks(["stragglers:on_rank"], RANKS, workload, rounds)
    ratios = [ratio(found, f"late-{delay}", f"delay-{delay}", composed=False) for delay in DELAYS]
    slow, every = os.environ[_SLOW], os.environ[_EVERY]
    notes = [f"late-N: with delay N, the attack rank pauses for {slow} of a step in every {every}th step"]
    return Findings(ratios, notes)


def on_rank(workload: Workload, rounds: int, world: World) -> dict[str, list[float]]:
    """Seconds per step by contender, one value per round; contenders take turns."""
    slow = float(os.environ[_SLOW])
    contenders = {f"delay-{delay}": (delay, 0.0) for delay in DELAYS} | {f"late-{d}": (d, slow) for d in DELAYS}
    tell = progress("stragglers") if world.is_main else silent
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        tell(number + 1, rounds)
        for name, (delay, pause) in contenders.items():
            seconds[name].append(step_seconds(delay, pause, int(os.environ[_EVERY])))
    return seconds


def step_seconds(delay: int, pause: float, every: int) -> float:
    """Seconds per step of a team in which the attack rank pauses for a part of a step, now and then."""
    with conadv.Team("clean | adv | attack", batch_size=2, chunk_size=2) as team:
        model = conadv.split_batchnorm(SleepingNet())
        method = team.method(conadv.ConAdv, model, F.cross_entropy, conadv.PGD(4 / 255), delay=delay)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = [(torch.rand(2, 4), torch.tensor([0, 1]))] * (_UNTIMED + _STEPS)
        is_late = team.place.role == Role.ATTACK
        for now, ahead in method.feed(loader):
            if method.step == _UNTIMED:
                team.world.barrier()
                start = time.perf_counter()
            if is_late and method.step % every == 0:
                time.sleep(pause * 3 * UNIT)
            method(now, ahead)
            optimizer.step()
        return (time.perf_counter() - start) / _STEPS


class SleepingNet(nn.Module):
    """A network whose passes take a given time and next to no computation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(self.norm(self.first(images)), self.weight)
        return out


class _Sleep(torch.autograd.Function):
    """A product whose forward pass takes one unit, and its backward pass one for each gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor) -> Tensor:
        time.sleep(UNIT)
        ctx.save_for_backward(images, weight)
        return images * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        images, weight = ctx.saved_tensors
        for_images, for_weight = ctx.needs_input_grad
        time.sleep(UNIT * (for_images + for_weight))
        return gradient * weight if for_images else None, (gradient * images).sum(0) if for_weight else None


def main(
    *,
    slow: Annotated[float, Parameter(help="The pause, as a part of a step.")] = 0.5,
    every: Annotated[int, Parameter(help="Steps between two pauses.")] = 4,
    rounds: Annotated[int, Parameter(help="How often each candidate is timed.")] = 5,
    image_size: Annotated[int, Parameter(help="Has no effect: the images are four numbers.")] = 2,
    json: Annotated[bool, Parameter(help="Print one JSON object.", negative="")] = False,
) -> None:
    """Time steps with an attack rank that is late now and then, by the delay."""
    if slow < 0 or every < 1 or rounds < 1:
        raise ValueError("take --slow of at least 0, and --every and --rounds of at least 1")
    os.environ.update({_SLOW: str(slow), _EVERY: str(every)})
    report({"stragglers": Measurement(measure, Workload(image_size=image_size), rounds, one_core=False)}, json)


if __name__ == "__main__":
    run_script(main)
