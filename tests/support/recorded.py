"""The communication of a run on every rank, recorded without other processes, and replayed under a strict rule.

Each rank runs by itself, with a torch.distributed that notes each call and answers at once. The replay then lets every
rank do its calls one at a time, in their order: a message is done when sender and receiver are both at it, a collective
when its whole group is. That is all that NCCL promises where its kernels do not run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conadv.ranks.collectives import World
from conadv.ranks.member import Member
from conadv.trainer.build import build_job, build_policy, build_stream, check_fit
from conadv.trainer.build_task import build_task
from conadv.trainer.checkpoint import NullSaver
from conadv.trainer.ledger import Progress
from conadv.trainer.loop import run
from conadv.trainer.metrics import Sinks
from conadv.trainer.profiling import Profile
from conadv.trainer.stop import StopRequest
from support import tiny


@dataclass(frozen=True)
class Call:
    """One call of a rank: the same on all members of a collective, and on both ends of a message."""

    kind: str
    members: tuple[int, ...]
    """The ranks of a collective; sender and receiver of a message."""
    group: int
    """The number of the group, in the order in which groups were made."""
    size: int
    """Numbers in the tensor."""


class Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Recording:
    """What stands in for torch.distributed on one rank."""

    rank: int
    size: int
    calls: list[Call] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        self.groups.append(tuple(range(self.size)))
        for name in ("all_reduce", "isend", "irecv", "new_group"):
            patch.setattr(dist, name, getattr(self, name))

    def new_group(self, ranks: Any = None, **_: Any) -> int:
        self.groups.append(tuple(range(self.size)) if ranks is None else tuple(ranks))
        return len(self.groups) - 1

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: int | None = None, **_: Any) -> Done:
        self.calls.append(Call("all_reduce", self.groups[group or 0], group or 0, tensor.numel()))
        if op == dist.ReduceOp.SUM:
            tensor.mul_(len(self.groups[group or 0]))  # as if all ranks had the same numbers
        return Done()

    def isend(self, tensor: Tensor, dst: int, group: int | None = None) -> Done:
        self.calls.append(Call("message", (self.rank, dst), group or 0, tensor.numel()))
        return Done()

    def irecv(self, tensor: Tensor, src: int, group: int | None = None) -> Done:
        self.calls.append(Call("message", (src, self.rank), group or 0, tensor.numel()))
        tensor.zero_()
        return Done()


def record(size: int, **changes: Any) -> list[list[Call]]:
    """The calls of each rank in a whole run."""
    return [record_rank(rank, size, changes) for rank in range(size)]


def record_rank(rank: int, size: int, changes: dict[str, Any], device: str = "cpu", late: bool = False) -> list[Call]:
    """The calls of one rank in a whole run, which may read the outcome of a step one step late."""
    recipe = tiny.recipe(**changes)
    world = World(rank, size, torch.device(device), timeout=60)
    task = build_task(recipe, world.device)
    stream = build_stream(recipe, task)
    recording = Recording(rank, size)
    with pytest.MonkeyPatch.context() as patch:
        recording.install(patch)
        # A rank that may lag receives zeros here, also in place of the checksum of the others.
        patch.setattr(Member, "check_weights", lambda *_: None)
        job = build_job(recipe, task, stream, check_fit(recipe, size), world, start=0)
        idle = Sinks(), NullSaver(), Profile(0, Path(), 0)
        policy = build_policy(recipe, stream, world.device)
        run(job, Progress(), replace(policy, late=policy.late or late), StopRequest(), *idle)
    return recording.calls


def replay(calls: list[list[Call]]) -> list[Call | None]:
    """What each rank waits for in the end: None where it is through."""
    done = [0] * len(calls)

    def head(rank: int) -> Call | None:
        return calls[rank][done[rank]] if done[rank] < len(calls[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(calls)):
            call = head(rank)
            if call is not None and all(head(member) == call for member in call.members):
                for member in call.members:
                    done[member] += 1
                moved = True
    return [head(rank) for rank in range(len(calls))]
