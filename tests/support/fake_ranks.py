"""One rank of many, alone in this process: PyTorch's `fake` backend, a store that counts, and a record of all calls.

The fake backend runs everything of torch.distributed but the communication. What other ranks would have sent is made
up: sums are those of ranks with the same numbers, messages are zeros, and what rank 0 broadcasts was recorded when it
was rehearsed itself.

The replay lets every rank do its calls one at a time, in their order: a message is done when sender and receiver are
both at it, a collective when its whole group is. That is all that NCCL promises where its kernels do not run at the
same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # registers the backend
from torch.utils._python_dispatch import TorchDispatchMode

from conadv.ranks import world as world_module
from conadv.ranks.world import World
from conadv.trainer import train as training
from conadv.trainer.build import build_job, build_task, check_fit
from conadv.trainer.loop import Progress, run
from conadv.trainer.stop import StopRequest
from support import tiny

assert fake_pg is not None


class CountingStore(dist.Store):
    """A store in this process that counts requests; what other ranks would set is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"conadv/attempt": "0", "conadv/0/outcome": "complete"}
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: str | bytes) -> None:
        self.requests["set"] += 1
        self.values[key] = _text(value)

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.requests["wait"] += 1

    def delete_key(self, key: str) -> bool:
        self.requests["delete_key"] += 1
        return True


def _text(value: str | bytes) -> str:
    """PyTorch's prefixed stores pass on bytes."""
    return value if isinstance(value, str) else value.decode()


class Call(NamedTuple):
    """One call of a rank: the same on all members of a collective, and on both ends of a message."""

    kind: str
    members: tuple[int, ...]
    """The ranks of a collective; sender and receiver of a message."""
    group: str
    size: int
    """Numbers in the tensors."""


class Calls(TorchDispatchMode):
    """The calls of torch.distributed, in order; those of DistributedDataParallel, too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "c10d":
            group, kind = dist.ProcessGroup.unbox(arguments[1]), function._opname
            ranks = tuple(dist.get_process_group_ranks(group))
            own = dist.get_rank()
            if kind in ("send", "recv_"):
                ranks = (own, arguments[2]) if kind == "send" else (arguments[2], own)
                kind = "message"
            self.made.append(Call(kind, ranks, group.group_name, sum(tensor.numel() for tensor in arguments[0])))
            if arguments[0][0].is_meta:  # PyTorch 2.8 has no such operators there: what is sent is made up anyway
                arguments = ([torch.empty_like(one, device="cpu") for one in arguments[0]], *arguments[1:])
        return function(*arguments, **(options or {}))


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


def record(size: int, **changes: Any) -> list[list[Call]]:
    """The calls of each rank in a whole run."""
    return [record_rank(rank, size, changes) for rank in range(size)]


def record_rank(rank: int, size: int, changes: dict[str, Any], device: str = "cpu", late: bool = False) -> list[Call]:
    """The calls of one rank in a whole run, which may read the outcome of a step one step late."""
    recipe = tiny.recipe(**changes)
    layout = check_fit(recipe, size)
    world = World(rank, size, torch.device(device), 60, layout.learners()[0])
    task = build_task(recipe, world.device)
    with pytest.MonkeyPatch.context() as patch, _alone(patch) as calls:
        if size > 1:
            dist.init_process_group("fake", store=CountingStore(), rank=rank, world_size=size)
        try:
            job = build_job(task, layout, world, start=0)
            run(replace(job, late=job.late or late), Progress(), StopRequest())
        finally:
            if size > 1:
                dist.destroy_process_group()
    return calls.made


@dataclass
class Rehearsal:
    """What one rank did in a whole run."""

    calls: list[Call]
    requests: Counter[str]
    """To the store."""
    groups: int
    """Process groups that it made, besides that of all ranks."""
    payloads: list[bytes] = field(repr=False)
    """What rank 0 broadcast."""


def rehearse(rank: int, size: int, folder: Path, changes: dict[str, Any], payloads: list[bytes] | None) -> Rehearsal:
    """Train as this rank, from joining the others to the summary.

    Args:
        rank: This rank.
        size: The number of ranks.
        folder: The folder of the run; one for each rank, since none of them is another's.
        changes: Fields of the recipe.
        payloads: What rank 0 broadcast in its own rehearsal; None for rank 0.
    """
    store, said, made = CountingStore(), [], []
    coming = iter(payloads or ())
    init, broadcast, new_group = dist.init_process_group, World.broadcast, dist.new_group

    def broadcast_of_rank_0(world: World, data: bytes, source: int | None = None) -> bytes:
        sent = data if payloads is None else next(coming)
        said.append(sent)
        broadcast(world, sent, source)
        return sent

    with pytest.MonkeyPatch.context() as patch, _alone(patch) as calls:
        for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % 8}.items():
            patch.setenv(name, str(value))
        patch.setattr(world_module, "rendezvous", lambda *_, **__: iter([(store, rank, size)]))
        patch.setattr(dist, "init_process_group", lambda backend, **options: init("fake", **options))
        patch.setattr(World, "broadcast", broadcast_of_rank_0)
        patch.setattr(dist, "new_group", lambda *ranks, **options: made.append(0) or new_group(*ranks, **options))
        training.train_recipe(tiny.recipe(**changes), folder, resume=None, quiet=True)
    return Rehearsal(calls.made, store.requests, len(made), said)


@contextmanager
def _alone(patch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Make up what other ranks would have sent, and record the calls."""
    all_reduce, irecv = dist.all_reduce, dist.irecv

    def sum_of_equals(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        if op == dist.ReduceOp.SUM and tensor.is_floating_point():
            tensor.mul_(dist.get_world_size(group))
        return all_reduce(tensor, op, group=group, **options)

    def receive_zeros(tensor: Tensor, *source: Any, **options: Any) -> Any:
        tensor.zero_()
        return irecv(tensor, *source, **options)

    patch.setattr(dist, "all_reduce", sum_of_equals)
    patch.setattr(dist, "irecv", receive_zeros)
    calls = Calls()
    with torch.random.fork_rng(), calls:
        yield calls
