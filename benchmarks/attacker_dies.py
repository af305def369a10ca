"""The picture of a run that loses an attacker: who generates twins when, before and after, and when another one joins.

    python benchmarks/attacker_dies.py --out docs/images/attacker-dies.svg

A learner and two attackers on Ray; one is killed with SIGKILL in the middle, and a third one is started then. Every
attack writes down its process and its time. The weights are compared with those of one process, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv

MOST_STEPS = 200
AFTER = 5  # steps after the new attacker has joined


@dataclass(frozen=True)
class Timed(conadv.PGD):
    """PGD that appends its process, step of the clock at its start and at its end to a file."""

    file: str = ""

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        began = time.monotonic()
        twins = super().__call__(*arguments, **named)
        with open(self.file, "a") as out:  # noqa: PTH123  # one write, so that lines of processes do not mix
            out.write(json.dumps([os.getpid(), began, time.monotonic()]) + "\n")
        return twins


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 32, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return conadv.split_batchnorm(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape, labels = (64, 3, 32, 32), (64,)
    return [
        (torch.rand(shape, generator=generator), torch.randint(10, labels, generator=generator)) for _ in range(count)
    ]


def train(
    attack: conadv.PGD, steps: int, pool: Any = None, each: Any = lambda step: True
) -> tuple[nn.Module, list[Any]]:
    """Train until `each` says that it is enough; returns the model, and when each step began and ended."""
    model, times = make_model(), []
    method = conadv.ConAdv(model, F.cross_entropy, attack, delay=2, chunk_size=32, twins=pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (now, ahead) in enumerate(method.feed(batches(steps))):
        began = time.monotonic()
        optimizer.zero_grad()
        method(now, ahead)
        optimizer.step()
        times.append((began, time.monotonic()))
        if not each(step):
            break
    return model, times


def with_a_kill(file: Path) -> tuple[nn.Module, list[Any], float, list[Any]]:
    """The run: the model, its steps, the time of the kill, and the attacks by process."""
    killed = 0.0
    seen: list[int] = []
    joined = 0

    def attacks() -> list[Any]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    with conadv.ray.Pool(make_model, attackers=2, wait=1.0) as pool:
        while pool.metrics()["attackers"] < 2:
            time.sleep(0.2)

        def each(step: int) -> bool:
            nonlocal killed, joined
            others = [process for process, *_ in attacks() if process != os.getpid()]
            seen[:] = sorted(set(others), key=others.index)
            if killed == 0 and step >= 6 and len(seen) == 2:
                os.kill(seen[1], signal.SIGKILL)
                killed = time.monotonic()
                pool.add(1)
            joined = joined or (step if len(seen) == 3 else 0)
            return joined == 0 or step < joined + AFTER

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an attacker was lost: this is the point
            model, times = train(Timed(8 / 255, steps=1, file=str(file)), MOST_STEPS, pool, each)
    return model, times, killed, attacks()


def draw(times: list[Any], killed: float, attacks: list[Any], out: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    matplotlib.rcParams["svg.hashsalt"] = "attacker dies"
    first = max(times[2][0], killed - 1.2)
    rows = [os.getpid(), *dict.fromkeys(process for process, *_ in attacks if process != os.getpid())]
    figure = Figure(figsize=(6.8, 2.6), layout="constrained")
    axis = figure.add_subplot(xlabel="seconds from the kill")
    for began, ended in times:
        axis.barh(0, ended - began, left=began - killed, color="#2e6fbb", edgecolor="white", linewidth=0.8, height=0.7)
    for process, began, ended in attacks:
        axis.barh(rows.index(process), ended - began, left=began - killed, color="#d1495b", height=0.7)
    axis.plot(0, 2, "kx", ms=9, mew=2)
    axis.text(0.0, 2, "   SIGKILL", va="center")
    names = ["learner", *(f"attacker {number}" for number in range(1, len(rows)))]
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.set_xlim(first - killed, times[-1][1] - killed)
    axis.spines[["top", "right", "left"]].set_visible(False)
    kinds = [
        Patch(color="#2e6fbb", label="a step: learn from images and twins"),
        Patch(color="#d1495b", label="attack"),
    ]
    figure.legend(handles=kinds, loc="outside upper left", ncols=2, frameon=False)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("attacker-dies.svg"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: on a busy machine, attackers would starve
    with TemporaryDirectory() as folder:
        model, times, killed, attacks = with_a_kill(Path(folder) / "attacks")
        alone, _ = train(
            Timed(8 / 255, file=str(Path(folder) / "alone")), MOST_STEPS, each=lambda step: step < len(times) - 1
        )
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    here = sum(process == os.getpid() for process, *_ in attacks)
    equal = all(torch.equal(one, other) for one, other in pairs)
    print(f"{len(times)} steps, {len(attacks)} attacks, {here} of them here; weights as of one process: {equal}")
    assert equal
    draw(times, killed, attacks, given.out)


if __name__ == "__main__":
    main()
