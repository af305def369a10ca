"""The process group of a run: its start and end, all_reduce, broadcast and barrier. No-ops on a single process."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from .attempt import AbsentError, agree_on_attempt
from .ending import deadline
from .heartbeats import Heartbeats
from .launch import has_local_rank, local_rank, rank_0_keeps_store, restarts, world_size
from .reading import Reading, poll

# Seconds after the timeout in which a backend should have raised its own error.
GRACE = 2.0
# NCCL's own watchdog aborts the process without a message, so its timeout is longer than ours.
_NCCL_GRACE = 60.0


class PeerError(ConnectionError):
    """Communication with another rank failed or timed out."""


@dataclass
class _Clock:
    since: float | None = None


@dataclass(frozen=True)
class World:
    """The process group of a run, as this rank sees it."""

    rank: int
    size: int
    device: torch.device
    heartbeats: Heartbeats | None = None
    """Heartbeats in the store; None: there is only this rank."""
    timeout: float = math.inf
    """Seconds to wait for another rank."""
    polls: bool = False
    """Whether `Work.wait` does not block the host, as with NCCL, so that the host must poll."""
    attempt: int = 0
    """How often the launcher has restarted the run."""
    _waits: _Clock = field(default_factory=_Clock, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    @property
    def is_waiting(self) -> bool:
        """Whether this rank is waiting for others, or has failed to."""
        return self._waits.since is not None

    def waited(self) -> float:
        """Return for how many seconds this rank has been waiting for others."""
        since = self._waits.since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for others within the context, and turn errors of the backend into PeerErrors."""
        self._waits.since = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # all backends raise it for a broken connection or a timeout
            raise PeerError(str(error)) from error
        else:
            self._waits.since = None

    def wait(self, work: dist.Work | None) -> None:
        """Block the host until `work` is done, or raise a PeerError after the timeout."""
        with self.waiting():
            if work is not None and self.polls:
                poll(work.is_completed, self.timeout)
            if work is not None:
                work.wait()

    def order(self, work: dist.Work | None) -> None:
        """Wait for `work` in the current stream of a GPU, without blocking the host; on the CPU the host waits."""
        with self.waiting():
            if work is not None:
                work.wait()

    def read(self, reading: Reading) -> list[float]:
        """Wait for numbers that depend on other ranks, or raise a PeerError after the timeout."""
        if self.size == 1:
            return reading.numbers(math.inf)
        with self.waiting():
            return reading.numbers(self.timeout)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            self.wait(self.start_all_reduce(tensor))
        return tensor

    def start_all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work | None:
        """Start an all_reduce (sum) over all ranks or those of a group, in place."""
        if self.size == 1:
            return None
        with self.waiting():
            work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
        return work

    def start_send(self, tensor: Tensor, target: int, group: dist.ProcessGroup) -> dist.Work:
        """Start to send a tensor, which must not change until the work is done."""
        with self.waiting():
            work = dist.isend(tensor, target, group=group)
        assert work is not None
        return work

    def start_receive(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
        """Start to receive a tensor, in place."""
        with self.waiting():
            work = dist.irecv(tensor, source, group=group)
        assert work is not None
        return work

    def all_reduce_max(self, number: int) -> int:
        """Return the largest `number` of all ranks."""
        largest = torch.tensor(number, device=self.device)
        if self.size > 1:
            self.wait(dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True))
        return int(largest)

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return the bytes of rank `source` on every rank."""
        if self.size == 1:
            return data
        size = torch.tensor(len(data), device=self.device)
        self.wait(dist.broadcast(size, source, async_op=True))
        received = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source and data:
            received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.wait(dist.broadcast(received, source, async_op=True))
        return received.cpu().numpy().tobytes()

    @torch.no_grad()
    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of rank 0 to those of all ranks, in one broadcast."""
        if self.size == 1:
            return
        message = torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in tensors])
        self.wait(dist.broadcast(message, 0, async_op=True))
        parts = message.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def new_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Create another process group, whose messages do not queue behind those of others; every rank must call it.

        Args:
            ranks: Its members; None: all ranks.
        """
        members = None if ranks is None else list(ranks)
        with self.waiting():
            group: dist.ProcessGroup = dist.new_group(members, timeout=_patience(self.timeout, self.polls))
        return group

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.all_reduce_max(0)


@contextmanager
def joined(timeout: float) -> Iterator[World]:
    """Join the process group of the ranks that were started together.

    Args:
        timeout: Seconds to wait for another rank, here and in all later communication.
    """
    device = own_device()
    if world_size() == 1:
        yield World(0, 1, device, timeout=timeout, attempt=restarts())
        return
    keeper = "rank 0" if rank_0_keeps_store() else "the launcher"
    silent = f"the {world_size()} ranks could not connect: the store, kept by {keeper}, stopped answering"
    with deadline(timeout + 2 * GRACE, silent):
        world = _join("nccl" if device.type == "cuda" else "gloo", device, timeout)
    try:
        yield world
    finally:
        gc.collect()  # an unreachable model that still holds the group, such as a DDP, can abort the process at exit
        with deadline(timeout + GRACE, "the process group of the ranks could not be closed"):
            dist.destroy_process_group()


def _join(backend: str, device: torch.device, timeout: float) -> World:
    heartbeats = None
    polls = backend == "nccl"
    try:
        kept, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        while isinstance(kept, dist.PrefixStore):  # type: ignore[attr-defined]
            kept = kept.underlying_store  # some versions of PyTorch prefix keys with the restarts of this machine
        attempt = agree_on_attempt(kept, rank, size, timeout)
        store = _store_of(kept, attempt)
        heartbeats = Heartbeats(store, rank, size)
        if rank == 0:
            heartbeats.open()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_patience(timeout, polls))
    except RuntimeError as error:
        if isinstance(error, AbsentError):  # rank 0 reports it for all ranks that have arrived
            heartbeats = Heartbeats(_store_of(kept, error.attempt), rank, size)
        with suppress(RuntimeError):
            if heartbeats is not None and not heartbeats.claim_report():
                raise SystemExit(1) from None
        reason = " ".join(str(error).split())
        advice = "on several machines, name the network device between them in GLOO_SOCKET_IFNAME"
        raise PeerError(f"the {world_size()} ranks could not connect ({reason}): {advice}") from error
    return World(rank, size, device, heartbeats, timeout, polls, attempt=max(attempt, restarts()))


def _store_of(kept: Any, attempt: int) -> Any:
    """Return the part of a store that belongs to one attempt. Any, since its type stub lacks multi_set."""
    return dist.PrefixStore(f"attempt-{attempt}", kept)  # type: ignore[attr-defined]


def _patience(timeout: float, polls: bool) -> timedelta:
    """Return the timeout of a process group, which is longer than ours if we poll."""
    return timedelta(seconds=timeout + (_NCCL_GRACE if polls else 0.0))


def own_device() -> torch.device:
    """Return the device of this rank: its own GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count, own = torch.cuda.device_count(), local_rank()
    if count > 1 and world_size() > 1 and not has_local_rank():
        raise ValueError(f"which of the {count} GPUs is this rank's? set LOCAL_RANK, or start with torchrun or srun")
    if 1 < count <= own:
        raise ValueError(
            f"process {own} of this machine has no GPU of its own among {count}: start {count} per machine"
        )
    # Some launchers show each process only its own GPU.
    device = torch.device("cuda", own if count > 1 else 0)
    torch.cuda.set_device(device)
    return device
