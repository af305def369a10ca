"""The processes that train together: their start and end, and sums over them. Alone, all of it vanishes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from .heartbeats import Heartbeats


class PeerError(ConnectionError):
    """Another rank did not answer."""


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    heartbeats: Heartbeats | None = None
    """What processes leave for each other outside of any exchange; None: there is only this one."""
    is_waiting: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Set while this process waits for others, so that whoever looks can tell who is waited for."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this process waits for others, and what goes wrong is a PeerError: theirs, not its own."""
        self.is_waiting.set()
        try:
            yield
        except RuntimeError as error:  # what every backend raises when a connection breaks or the time is up
            raise PeerError(str(error)) from error
        else:
            self.is_waiting.clear()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            with self.waiting():
                dist.all_reduce(tensor)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> dist.Work | None:
        """Begin a sum over all processes, in place; it is there when the work is waited for."""
        if self.size == 1:
            return None
        with self.waiting():
            work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work

    def all_reduce_max(self, number: int) -> int:
        """The largest of the numbers that the processes have."""
        largest = torch.tensor(number, device=self.device)
        if self.size > 1:
            with self.waiting():
                dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def broadcast(self, data: bytes) -> bytes:
        """The bytes that the leading process has, on every process."""
        if self.size == 1:
            return data
        with self.waiting():
            size = torch.tensor(len(data), device=self.device)
            dist.broadcast(size, 0)
            received = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            if self.is_main and data:
                received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(received, 0)
        return received.cpu().numpy().tobytes()

    def barrier(self) -> None:
        if self.size > 1:
            with self.waiting():
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
    world = _join("nccl" if device.type == "cuda" else "gloo", device, timeout)
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _join(backend: str, device: torch.device, timeout: float) -> World:
    patience = timedelta(seconds=timeout)
    heartbeats = None
    try:
        kept, rank, size = next(rendezvous("env://", timeout=patience))
        # torchrun keeps the store when it starts the ranks again, with addresses in it that nobody has any more.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt-{attempt}", kept)  # type: ignore[attr-defined]
        heartbeats = Heartbeats(store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except RuntimeError as error:
        if heartbeats is not None and not heartbeats.claim_report():
            raise SystemExit(1) from None
        reason = " ".join(str(error).split())
        advice = "on several machines, name the network device between them in GLOO_SOCKET_IFNAME"
        raise PeerError(f"the {world_size()} ranks did not come together ({reason}): {advice}") from error
    return World(rank, size, device, heartbeats)


def own_device() -> torch.device:
    """The device of this process: its own GPU where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
