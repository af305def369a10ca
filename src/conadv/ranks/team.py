"""Roles in your own training loop: `conadv.Team`.

with conadv.Team("clean | adv | attack", batch_size=192, chunk_size=64) as team:      under torchrun, on every rank
    loader = DataLoader(dataset, batch_sampler=team.sampler(dataset))                 each rank reads its own images
    method = team.method(conadv.ConAdv, model, loss, conadv.PGD(4 / 255))             replaces DDP
    for now, ahead in method.feed(loader):
        method(now, ahead)                      gradients and running statistics are those of all ranks afterwards
        optimizer.step()
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from conadv.core.attack import Attack, Loss
from conadv.core.roles import Place, Role
from conadv.core.step import Losses
from conadv.core.twins import TwinShare
from conadv.core.validate import described
from conadv.wrappers import is_exchanged

from .agreement import AgreedError, check_agreement
from .collectives import World, joined, own_device
from .heartbeats import Heartbeats
from .launch import adopt_slurm, world_size
from .layout import Layout
from .member import build_member
from .outcome import DriftError, NotFiniteError
from .sampler import TeamSampler
from .team_epochs import TeamEpochs
from .team_method import TeamMethod
from .watch import watched

_TEAMS = itertools.count()  # several teams in one process group use different keys in its store
# Arguments of a method that the team sets.
_OWN = ("chunk_size", "seed")


class Team:
    """The ranks of a layout, in your own training loop; a context manager.

    It uses the default process group if there is one; otherwise it creates one from the environment of torchrun or
    srun. Within the context, if a rank raises an error, crashes or hangs, all ranks end and one line names it.

    Args:
        layout: the role of each rank of a lane, such as "clean | adv | attack" or "3 clean | 3 adv | 2 attack".
            None: every rank does everything.
        batch_size: images per step, over all ranks.
        chunk_size: images per forward pass, which share BatchNorm statistics. Results depend on it, but not on the
            layout.
        seed: the seed of everything random in the method and of the order of `sampler`; the same on all ranks.
        timeout: seconds to wait for another rank before all ranks end.
    """

    def __init__(
        self,
        layout: str | None = None,
        *,
        batch_size: int,
        chunk_size: int,
        seed: int = 0,
        timeout: float = 600.0,
    ) -> None:
        if chunk_size < 1 or batch_size < 1 or batch_size % chunk_size:
            raise ValueError(
                f"a batch of {batch_size} images is not a whole number of chunks of {chunk_size}: "
                "choose a chunk_size that divides batch_size"
            )
        self._text = layout
        self._batch_size, self._chunk_size, self._chunks = batch_size, chunk_size, batch_size // chunk_size
        self._seed, self._timeout = seed, timeout
        self._world: World | None = None
        self._method: TeamMethod | None = None
        self._stack = ExitStack()

    @property
    def world(self) -> World:
        """The ranks: `rank`, `size`, `device`, and `is_main`, which is true on rank 0."""
        if self._world is None:
            raise ValueError('the Team is not open: use it in "with conadv.Team(...) as team:"')
        return self._world

    @property
    def layout(self) -> Layout:
        """Which rank does what."""
        return Layout.fit(self._text, _duties(self._text), self.world.size)

    @property
    def place(self) -> Place:
        """The role of this rank, and which chunks of a batch it sees."""
        return self.layout.place(self.world.rank, self._chunks)

    def __enter__(self) -> Self:
        adopt_slurm()
        size = dist.get_world_size() if dist.is_initialized() else world_size()
        layout = Layout.fit(self._text, _duties(self._text), size)
        layout.place(0, self._chunks)  # raises a ValueError if the ranks cannot share the chunks
        agreed = (AgreedError, NotFiniteError, DriftError)
        with ExitStack() as stack:
            self._world = stack.enter_context(_met(self._timeout))
            stack.enter_context(watched(self._world, layout, agreed, hint="raise the timeout of the Team"))
            check_agreement(self._world, {"flags": self._flags()})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if self._method is not None and error[0] is None:
            self._stack.callback(self._method.close)
        return self._stack.__exit__(*error)

    def sampler(self, data: Sized, shuffle: bool = True) -> TeamSampler:
        """Return a batch sampler that yields the images of this rank: `DataLoader(data, batch_sampler=...)`.

        Args:
            data: the data set, of which only the length is used.
            shuffle: whether to shuffle in each epoch (`set_epoch`); False: keep the order of the data set.
        """
        place, size = self.place, self._chunk_size
        assert place.chunks is not None
        own = slice(place.first_chunk * size, (place.first_chunk + place.chunks) * size)
        return TeamSampler(data, self._batch_size, own, self._seed, shuffle)

    def method(self, factory: Any, model: nn.Module, loss: Loss, *arguments: Any, **options: Any) -> TeamMethod:
        """Build a method whose steps all ranks take together. Every rank must call it; all get the weights of rank 0.

        Args:
            factory: `conadv.ConAdv`, `Recycled`, `Vanilla` or `Sam`.
            model: the network, on the device of this rank, after `split_batchnorm`, and not wrapped in
                DistributedDataParallel.
            loss: computes the mean loss over the images from outputs and labels.
            arguments: further positional arguments of the method, such as the attack.
            options: keyword arguments of the method, such as `delay`, `twin_share`, `autocast` and `batch`.
        """
        self._check(model, options)
        check_agreement(self.world, {"method": _settings(factory, arguments, options)})
        layout = Layout.fit(self._text, factory.duties, self.world.size)
        share = TwinShare.from_number(options.get("twin_share", 1))
        layout.check_twins(self._chunks, share.of, share.some, options.get("shuffle_twins", 1))
        has_twins = partial(share.has, self._seed)
        accepted = inspect.signature(factory).parameters
        delay = options.get("delay", accepted["delay"].default if "delay" in accepted else factory.delay)
        self.world.broadcast_tensors([*model.parameters(), *model.buffers()])

        def make() -> Any:
            return factory(model, loss, *arguments, **options, chunk_size=self._chunk_size, seed=self._seed)

        member = build_member(
            self.world,
            layout,
            model,
            make,
            chunks=self._chunks,
            delay=delay,
            has_twins=has_twins,
            wire=None,
            keeps_stale=self.world.is_main and Role.ATTACK in layout.duties,
        )
        epochs = TeamEpochs(member, model, self._chunk_size, options.get("batch"), has_twins)
        settings = {"chunk_size": self._chunk_size, "twin_share": float(share), "seed": self._seed}
        settings |= {"twin_branch": options.get("twin_branch", "adv"), "shuffle_twins": options.get("shuffle_twins", 1)}
        self._method = TeamMethod(member, model, epochs, settings)
        return self._method

    def all_reduce(self) -> Losses:
        """Sum gradients and statistics over the ranks, after the backward pass of `method.loss`.

        Every rank must call it. Most all_reduces have started during the backward pass. Clip or unscale the gradients
        afterwards. If they are not finite, they are not finite on all ranks, so a `GradScaler` skips the update on all.

        Returns:
            The mean losses over the whole batch, unscaled and the same on all ranks.
        """
        if self._method is None:
            raise ValueError("a Team sums the gradients of its method: make it with team.method(...)")
        return self._method.all_reduce()

    def _check(self, model: nn.Module, options: dict[str, Any]) -> None:
        known = [name for name in _OWN if name in options]
        if known:
            raise ValueError(f"{known[0]} is what the Team decides: leave it out")
        if is_exchanged(model):
            raise ValueError("a Team sums gradients itself: pass the model without DistributedDataParallel or FSDP")
        if self._method is not None:
            raise ValueError("a Team has one method: make another Team for another one")

    def _flags(self) -> dict[str, Any]:
        sizes = {"batch_size": self._batch_size, "chunk_size": self._chunk_size}
        return {"layout": self._text, **sizes, "seed": self._seed, "torch": torch.__version__}


def _settings(factory: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method that have to be the same on all ranks, as JSON values."""
    attack = next((given for given in (*arguments, options.get("attack")) if isinstance(given, Attack)), None)
    plain = {name: value for name, value in options.items() if isinstance(value, bool | int | float | str)}
    found = {"method": getattr(factory, "__name__", type(factory).__name__), **plain, **described(attack)}
    settings: dict[str, Any] = json.loads(json.dumps(found, default=lambda value: type(value).__name__))
    return settings


def _duties(text: str | None) -> Role:
    """Return the duties of a layout, before its method is known."""
    return Role.CLEAN | Role.ADV | Role.ATTACK if text is None else Layout.duties_in(text)


@contextmanager
def _met(timeout: float) -> Iterator[World]:
    """Use the default process group, which stays, or create one and close it at the end."""
    if not dist.is_initialized():
        with joined(timeout) as world:
            yield world
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"conadv-team-{next(_TEAMS)}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    heartbeats = Heartbeats(store, rank, size)  # type: ignore[arg-type]  # multi_set is missing in its stub
    if rank == 0:
        heartbeats.open()
    dist.barrier()
    yield World(rank, size, own_device(), heartbeats if size > 1 else None, timeout, dist.get_backend() == "nccl")
