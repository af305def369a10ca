"""The processes that train together: their start and end, and sums over them. Alone, all of it vanishes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: Tensor) -> dist.Work | None:
        """Begin a sum over all processes, in place; it is there when the work is waited for."""
        return dist.all_reduce(tensor, async_op=True) if self.size > 1 else None

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """The number of this process among them."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def joined(timeout: float) -> Iterator[World]:
    """Be one of the processes that torchrun started. Whoever does not answer for `timeout` seconds ends them all."""
    device = own_device()
    if world_size() == 1:
        yield World(0, 1, device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def own_device() -> torch.device:
    """The device of this process: its own GPU where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
