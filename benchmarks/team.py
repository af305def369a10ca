"""A step of `conadv.Team` in a user's own loop against the step of `conadv train`, on 2 ranks.

python benchmarks/team.py --json
"""

from __future__ import annotations

import torch.nn.functional as F

import conadv
from conadv.optim.groups import parameter_groups
from conadv.parallel.collectives import World
from conadv.study.bench.alternate import Tell
from conadv.study.bench.command import Measurement
from conadv.study.bench.contender import Contender, Share, block_steps, build_share, take_turns
from conadv.study.bench.layout import ratio
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.result import Findings
from conadv.study.bench.workload import Workload, attack
from scripts import run_workload

RANKS = 2
LAYOUT = "clean | adv"


def measure(workload: Workload, rounds: int, tell: Tell) -> Findings:
    """Time of a step of recycled in a user's own loop, divided by that in the loop of `conadv train`."""
    (found,) = run_ranks(["team:on_rank"], RANKS, workload, rounds)
    return Findings([ratio(found["wall"], "team", "train", composed=False)], [f'recycled "{LAYOUT}" on {RANKS} ranks'])


def on_rank(workload: Workload, rounds: int, world: World) -> dict[str, dict[str, list[float]]]:
    """Seconds per step of both, in turn."""
    steps = block_steps(rounds)
    size = workload.chunk_size
    own = build_share(Contender("train", "recycled", LAYOUT), workload, world, steps)
    with conadv.Team(LAYOUT, batch_size=size, chunk_size=size, timeout=1800) as team:
        shares = {"train": own, "team": team_share(team, workload, steps)}
        return take_turns(shares, rounds, world)


def team_share(team: conadv.Team, workload: Workload, steps: int) -> Share:
    """A user's own loop, a step at a time, with a learning rate of 0."""
    model = workload.build("recycled")
    method = team.method(conadv.Recycled, model, F.cross_entropy, attack())
    optimizer = conadv.Lars(parameter_groups(model, 5e-4), lr=0.0)
    pairs = iter(method.feed([workload.batch()] * steps))

    def step() -> None:
        now, ahead = next(pairs)
        method(now, ahead)
        optimizer.step()

    return Share(step)


if __name__ == "__main__":
    run_workload("team", Measurement(measure, Workload(), 10, one_core=False), __doc__)
