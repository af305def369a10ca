"""`conadv train` as one rank of many, alone in this process: PyTorch's `fake` backend, and a store that counts.

The fake backend runs everything of torch.distributed but the communication. What other ranks would have sent is made
up: sums are those of ranks with the same numbers, messages are zeros, and what rank 0 broadcasts was recorded when it
was rehearsed itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # registers the backend
from torch.utils._python_dispatch import TorchDispatchMode

from conadv.ranks import collectives
from conadv.ranks.collectives import World
from conadv.ranks.member import Member
from conadv.trainer import training
from support import tiny

assert fake_pg is not None


class CountingStore(dist.Store):
    """A store in this process that counts requests.

    Args:
        present: How many ranks other than 0 have come already.
    """

    def __init__(self, present: int = 0) -> None:
        super().__init__()
        self.values = {"conadv/attempts/0/present": str(present)}
        self.requests: Counter[str] = Counter()

    def _value(self, key: str) -> str:
        if key.startswith("conadv/answers/"):  # that of rank 0, which would be waited for
            return "0"
        return self.values[key]

    def set(self, key: str, value: str | bytes) -> None:
        self.requests["set"] += 1
        self.values[key] = _text(value)

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def append(self, key: str, value: str | bytes) -> None:
        self.requests["append"] += 1
        self.values[key] = self.values.get(key, "") + _text(value)

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self._value(key).encode()

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self.requests["multi_set"] += 1
        self.values.update(zip(keys, map(_text, values), strict=True))

    def multi_get(self, keys: list[str]) -> Sequence[bytes]:
        self.requests["multi_get"] += 1
        return [self._value(key).encode() for key in keys]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self.requests["compare_set"] += 1
        if self.values.setdefault(key, _text(expected)) == _text(expected):
            self.values[key] = _text(desired)
        return self.values[key].encode()


def _text(value: str | bytes) -> str:
    """PyTorch's prefixed stores pass on bytes."""
    return value if isinstance(value, str) else value.decode()


class Calls(TorchDispatchMode):
    """The calls of torch.distributed: operator, number of the group in the order of use, and size of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int, int]] = []
        self._groups: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "c10d":
            name = dist.ProcessGroup.unbox(arguments[1]).group_name
            if name not in self._groups:
                self._groups.append(name)
            self.made.append((function._opname, self._groups.index(name), sum(x.numel() for x in arguments[0])))
        return function(*arguments, **(options or {}))


@dataclass
class Rehearsal:
    """What one rank did in a whole run."""

    calls: list[tuple[str, int, int]]
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
    with pytest.MonkeyPatch.context() as patch, _pretending(patch, rank, size, payloads) as (store, calls, said):
        made: list[Any] = []
        new_group = dist.new_group
        patch.setattr(dist, "new_group", lambda *ranks, **options: made.append(0) or new_group(*ranks, **options))
        training.train(tiny.recipe(**changes), folder, resume=None, quiet=True)
    return Rehearsal(calls.made, store.requests, len(made), said)


@contextmanager
def _pretending(
    patch: pytest.MonkeyPatch, rank: int, size: int, payloads: list[bytes] | None
) -> Iterator[tuple[CountingStore, Calls, list[bytes]]]:
    store, calls, said = CountingStore(size - 1), Calls(), []
    coming = iter(payloads or ())
    init, all_reduce, irecv, broadcast = dist.init_process_group, dist.all_reduce, dist.irecv, World.broadcast

    def sum_of_equals(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))
        return all_reduce(tensor, op, group=group, **options)

    def receive_zeros(tensor: Tensor, *source: Any, **options: Any) -> Any:
        tensor.zero_()
        return irecv(tensor, *source, **options)

    def broadcast_of_rank_0(world: World, data: bytes, source: int = 0) -> bytes:
        sent = data if payloads is None else next(coming)
        said.append(sent)
        broadcast(world, sent, source)
        return sent

    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % 8}.items():
        patch.setenv(name, str(value))
    patch.setattr(collectives, "rendezvous", lambda *_, **__: iter([(store, rank, size)]))
    patch.setattr(dist, "init_process_group", lambda backend, **options: init("fake", **options))
    patch.setattr(dist, "all_reduce", sum_of_equals)
    patch.setattr(dist, "irecv", receive_zeros)
    patch.setattr(World, "broadcast", broadcast_of_rank_0)
    patch.setattr(Member, "check_weights", lambda *_: None)  # of a rank that may lag: zeros came instead of checksums
    with torch.random.fork_rng(), calls:
        yield store, calls, said
