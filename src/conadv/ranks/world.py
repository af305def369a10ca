"""The ranks of a run: process group, all_reduce, broadcast and barrier. No-ops on a single process."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from conadv.last_words import end_process, say_line

from .launch import local_rank, own_rank, rank_0_keeps_store, restarts, world_size

# Seconds after the timeout in which a backend should have raised its own error.
GRACE = 2.0


@dataclass(frozen=True)
class World:
    """The process group of a run, as this rank sees it."""

    rank: int
    size: int
    device: torch.device
    timeout: float = math.inf
    """Seconds to wait for another rank."""
    main: int = 0
    """The rank that prints and writes files: the first one that learns."""
    attempt: int = 0
    """Not 0 if torchrun has restarted the run."""

    @property
    def is_main(self) -> bool:
        return self.rank == self.main

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Sum a tensor over all ranks, or those of a group, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any rank is set; waits until all ranks have called it."""
        return flag if self.size == 1 else bool(self.all_reduce(torch.tensor(float(flag), device=self.device)))

    def broadcast(self, data: bytes, source: int | None = None) -> bytes:
        """Return the bytes of one rank on every rank; by default those of `main`."""
        if self.size == 1:
            return data
        source = self.main if source is None else source
        size = torch.tensor(len(data), device=self.device)
        dist.broadcast(size, source)
        received = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source and data:
            received.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(received, source)
        return received.cpu().numpy().tobytes()

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of `main` to those of all ranks, in one broadcast."""
        if self.size > 1:
            message = flat(tensors)
            dist.broadcast(message, self.main)
            unflatten(message, tensors)

    def new_group(self, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Create another process group, whose messages do not queue behind those of others; every rank must call it.

        Args:
            ranks: its members; None: all ranks.
        """
        members = None if ranks is None else list(ranks)
        group: dist.ProcessGroup = dist.new_group(members, timeout=timedelta(seconds=self.timeout))
        return group

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.any(False)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one message of bytes."""
    return torch.cat([tensor.detach().flatten().view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def unflatten(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a message that `flat` made into tensors of the same shapes."""
    parts = message.split([tensor.numel() * tensor.element_size() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone is aligned


@contextmanager
def joined(timeout: float, main: int = 0) -> Iterator[World]:
    """Join the process group of the ranks that were started together; one that exists is used and left open.

    Args:
        timeout: seconds to wait for another rank, here and in all later communication.
        main: the rank that prints and writes files.
    """
    device, attempt = own_device(), restarts()
    exists = dist.is_initialized()
    size = dist.get_world_size() if exists else world_size()
    if size == 1:
        yield World(0, 1, device, timeout, attempt=attempt)
        return
    if not exists:
        keeper = "rank 0" if rank_0_keeps_store() else "the launcher"
        silent = f"error: the {size} ranks could not connect: the store, kept by {keeper}, stopped answering"
        with deadline(timeout + 4 * GRACE, silent):
            attempt = max(attempt, _connect("nccl" if device.type == "cuda" else "gloo", timeout))
    try:
        yield World(dist.get_rank(), size, device, timeout, main, attempt)
    finally:
        gc.collect()  # an unreachable model that still holds the group, such as a DDP, can abort the process at exit
        if not exists:
            with deadline(timeout + GRACE, "error: the process group of the ranks could not be closed"):
                dist.destroy_process_group()


def _connect(backend: str, timeout: float) -> int:
    """Create the default process group, with keys that no earlier attempt has used; return the number of this one."""
    patience = timedelta(seconds=timeout)
    try:
        kept, rank, size = next(rendezvous("env://", timeout=patience))
        while isinstance(kept, dist.PrefixStore):  # type: ignore[attr-defined]
            kept = kept.underlying_store  # some versions of PyTorch prefix keys with the restarts of this machine
        attempt = agree_on_attempt(kept, rank, size, timeout)
        store = dist.PrefixStore(f"attempt-{attempt}", kept)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        return attempt
    except RuntimeError as error:
        if own_rank() and isinstance(error, dist.DistStoreError):
            time.sleep(2 * GRACE)  # rank 0 says which ranks did not come
        reason = " ".join(str(error).split())
        advice = "on several machines, name the network device between them in GLOO_SOCKET_IFNAME"
        raise ConnectionError(f"the {world_size()} ranks could not connect ({reason}): {advice}") from error


def agree_on_attempt(store: Any, rank: int, size: int, timeout: float) -> int:
    """Return the number of this attempt at a run: 0, or 1, 2, ... after torchrun has restarted the ranks.

    torchrun keeps the store when it restarts the ranks, with keys of earlier processes, and its agents count their own
    restarts, so nodes can have different counts. So rank 0 numbers the attempts, waits until all ranks have read the
    number (other ranks: for the timeout of their store), and removes it. A rank that has read the number of an attempt
    that died before, reads again.
    """
    while rank:
        number = int(store.get("conadv/attempt"))
        store.set(f"conadv/{number}/{rank}", "")
        if store.get(f"conadv/{number}/outcome") == b"complete":
            return number
    number = int(store.add("conadv/attempts", 1)) - 1
    keys = {other: f"conadv/{number}/{other}" for other in range(1, size)}
    store.set("conadv/attempt", str(number))
    if number:
        store.set(f"conadv/{number - 1}/outcome", "over")
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout))
    except RuntimeError:
        missing = [str(other) for other, key in keys.items() if not store.check([key])]
        which = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
        raise RuntimeError(f"{which} did not come within {timeout:g} seconds") from None
    store.delete_key("conadv/attempt")
    store.set(f"conadv/{number}/outcome", "complete")
    return number


@contextmanager
def deadline(seconds: float, text: str, before_exit: Callable[[int], None] = lambda status: None) -> Iterator[None]:
    """Limit the time within the context: after `seconds`, print `text` and exit with status 1."""

    def give_up() -> None:
        say_line(text)
        before_exit(1)
        end_process(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_device() -> torch.device:
    """Return the device of this rank: its own GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count, own = torch.cuda.device_count(), local_rank(missing=-1 if world_size() > 1 else 0)
    if count > 1 and own < 0:
        raise ValueError(f"which of the {count} GPUs is this rank's? set LOCAL_RANK, or start with torchrun")
    if 1 < count <= own:
        raise ValueError(
            f"process {own} of this machine has no GPU of its own among {count}: start {count} per machine"
        )
    # Some launchers show each process only its own GPU.
    device = torch.device("cuda", own if count > 1 else 0)
    torch.cuda.set_device(device)
    return device
