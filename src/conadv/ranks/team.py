"""Roles in your own training loop: `conadv.Team`.

with conadv.Team("clean | adv | attack", batch_size=192, chunk_size=64) as team:      under torchrun, on every rank
    loader = DataLoader(dataset, batch_sampler=team.sampler(dataset))                 each rank reads its own images
    method = team.method(conadv.ConAdv, model, loss, conadv.PGD(4 / 255))             replaces DDP
    for now, ahead in method.feed(loader):
        optimizer.zero_grad()
        method(now, ahead)                      gradients and running statistics are those of all ranks afterwards
        optimizer.step()
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Self

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conadv import last_words
from conadv.core.algorithm import Recycled
from conadv.core.attack import Attack, Loss
from conadv.core.batch import Batch, Chunked, count_chunks
from conadv.core.roles import Place, Role
from conadv.core.splitbn import update_running_stats
from conadv.core.state import State, below, pack, unpack
from conadv.core.step import Losses, Method
from conadv.core.twins import TwinShare
from conadv.core.validate import described
from conadv.wrappers import is_exchanged

from .agreement import AgreedError, check_agreement
from .faults import guarded
from .launch import adopt_slurm, world_size
from .layout import Layout
from .mail import Wire
from .member import Member, StepError, Unread
from .sampler import TeamSampler
from .world import World, joined

# Arguments of a method that the team sets.
_OWN = ("chunk_size", "seed")
# Steps between two comparisons of the weights of the ranks.
_COMPARED = 100


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
        """The ranks: `rank`, `size`, `device`, and `is_main`, which is true on the first rank that learns."""
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
        agreed = (AgreedError, StepError)
        with ExitStack() as stack:
            self._world = stack.enter_context(joined(self._timeout, main=layout.learners()[0]))
            if size > 1:
                stack.enter_context(last_words.witnessed(layout.describe(self._world.rank)))
            hint = "raise the timeout of the Team"
            stack.enter_context(guarded(self._world, layout, agreed, hint=hint, raises=True))
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
        """Build a method whose steps all ranks take together. Every rank must call it; all get the same weights.

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
        self.world.broadcast_tensors([*model.parameters(), *model.buffers()])
        method = factory(model, loss, *arguments, **options, chunk_size=self._chunk_size, seed=self._seed)
        has_twins = partial(share.has, self._seed)
        member = Member(self.world, layout, model, method, chunks=self._chunks, has_twins=has_twins)
        self._method = TeamMethod(member, model, self._chunk_size)
        return self._method

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


class TeamMethod:
    """The method that `conadv.Team.method` returns; every rank calls it once per step.

    Args:
        member: this rank.
        model: the network.
        chunk_size: images per chunk.
    """

    def __init__(self, member: Member, model: nn.Module, chunk_size: int) -> None:
        self._member, self._model, self._chunk_size = member, model, chunk_size
        self._begin = self._end = 0  # first step of the epoch, and the one after its last
        self._done = 0  # steps of the epoch that were taken before a resume
        self._unread: Unread | None = None
        self._is_late = member.world.device.type != "cpu"  # read outcomes one step late, so that the host does not wait
        self.losses = Losses(torch.zeros(()), torch.zeros(()))
        """The mean losses of the last step over the whole batch; 0 on a rank that only attacks."""

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._method.step

    def feed(self, loader: Iterable[Any]) -> TeamFeed:
        """Return an iterable of the arguments of each step of an epoch; every rank must iterate to the same step.

        Args:
            loader: yields the images of this rank, as with `team.sampler`. Its length is the same on every rank.
        """
        return TeamFeed(self, loader)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        """Take a step up to the update: gradients and running statistics are those of all ranks afterwards.

        On a rank that only attacks there are no gradients: an update does nothing, and weights come with the next call.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.

        Returns:
            The mean losses over the whole batch; 0 on a rank that only attacks.
        """
        self._check_begun()
        return self._take(self._member.step(now, ahead))

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        """Return this rank's part of the loss of a step, for a loop that scales it or calls backward itself.

        Backpropagate it once on every rank: gradients are those of all ranks then, scaled as the loss was. It keeps the
        graph of all chunks in memory. On a rank that only attacks it is 0. The mean losses are in `losses`.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.
        """
        self._check_begun()
        total, unread = self._member.loss(now, ahead)
        self._take(unread)
        return total

    def state_dict(self) -> State:
        """Return what the next step needs besides the weights, as tensors by name. Every rank must call it.

        The rank `team.world.is_main` saves it. It resumes in any layout, except with `Sam`. With `ConAdv` it contains
        the weights of the last `delay` steps, with `Recycled` the twins in flight.
        """
        self._settle()
        if isinstance(self._method, Recycled):
            about = {**self._method._identity(), "step": self.step}
            state = pack(about, self._gather_twins(self._method), own=False, all_ranks=False)
        else:
            state = self._method.state_dict(all_ranks=self._member.world.size > 1)
        return {**state, "done": torch.tensor(self.step - self._begin if self.step < self._end else 0)}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore what `state_dict` returned. Every rank must call it, after loading the model's weights.

        Returns:
            How many steps of the epoch were taken, so that its loader can start there
            (`sampler.set_epoch(epoch, start)`); 0 at the end of an epoch.
        """
        own = {name: tensor for name, tensor in state.items() if name != "done"}
        method = self._method
        if isinstance(method, Recycled) or self._member.only_attacks:
            about, tensors = unpack(own, method._identity(), own=False)
            method._step.t = about["step"]
            if isinstance(method, Recycled):
                method.twins.reset()
                found = [below(f"{chunk}.", tensors) for chunk in self._own_chunks(method)]
                device = self._member.world.device
                method.twins.adopt([Batch(one["images"].to(device), one["labels"].to(device)) for one in found if one])
        else:
            method.load_state_dict(own)
        self._begin = self._end = self.step
        self._done = int(state.get("done", 0))
        return self._done

    def close(self) -> None:
        """Wait for messages in flight; all ranks must have taken the same number of steps."""
        self._settle()
        self._member.drain()

    def begin_epoch(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Begin an epoch on all ranks, and yield the arguments of each step."""
        self._settle()
        if not isinstance(loader, Sized):
            raise ValueError("a Team needs a loader with a length, which all ranks compare")
        check_agreement(self._member.world, {"data": {"batches": len(loader)}})
        self._begin, self._end, self._done = self.step - self._done, self.step + len(loader), 0
        batches = map(self._checked, loader)
        post = self._member.post
        if post is not None and post.wire is None and (first := next(batches, None)) is not None:
            post.wire = self._wire(first)
            batches = chain([first], batches)  # type: ignore[assignment]
        yield from self._member.feed(batches, self._end)

    @property
    def _method(self) -> Method:
        return self._member.method

    def _take(self, unread: Unread) -> Losses:
        """Check the outcome of a step, on a GPU of the one before, and update the running statistics."""
        if self._is_late:
            self._settle()
        self._unread = unread
        if not self._is_late:
            self._settle()
        if self.step % _COMPARED == 0:
            self._member.check_weights(self.step)
        update_running_stats(self._model)
        self.losses = unread.losses
        return unread.losses

    def _settle(self) -> None:
        """Read the outcome of the last step, unless that was done; raise an error if it is not finite."""
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.read()

    def _check_begun(self) -> None:
        """Raise a ValueError outside an epoch, where other ranks would neither send nor receive twins."""
        if self._member.post is not None and not self._begin <= self.step < self._end:
            raise ValueError("no epoch has begun: take the batches from `method.feed(loader)`, in each epoch")

    def _checked(self, item: Any) -> Batch | Chunked:
        """Convert an item of the loader to a batch, and check that it has the chunks of this rank."""
        batch, place = self._method._step.batch(item), self._member.place
        assert place.chunks is not None
        if count_chunks(batch, self._chunk_size) != place.chunks:
            who, size = self._member.layout.describe(self._member.world.rank), place.chunks * self._chunk_size
            raise ValueError(f"{who} needs batches of {size} images: take the batches from team.sampler")
        return batch

    def _wire(self, batch: Batch | Chunked) -> Wire:
        """The message format of twins, which every rank finds in its own batch."""
        if isinstance(batch, Chunked):
            raise ValueError("a Team needs batches that are whole: yield (images, labels) or a conadv.Batch")
        images, recycled = batch.images, isinstance(self._method, Recycled)
        as_bytes = images.dtype == torch.uint8
        dtype = next(self._model.parameters()).dtype if as_bytes else images.dtype
        exact = self._method.attack.exact_as_bytes(from_images=recycled)  # type: ignore[attr-defined]
        return Wire((self._chunk_size, *images.shape[1:]), dtype, as_bytes=as_bytes and exact)

    def _own_chunks(self, method: Recycled) -> list[int]:
        """The chunks of the last batch whose twins this rank learns from next."""
        place, step = self._member.place, method._step
        if Role.ADV not in place.role or not self.step:
            return []
        assert place.chunks is not None
        return [place.first_chunk + k for k in range(place.chunks) if step.has_twin(self.step - 1, k)]

    def _gather_twins(self, method: Recycled) -> State:
        """The twins of all ranks that the next step learns from, by the numbers of their chunks."""
        world = self._member.world
        own: State = {}
        found: State = {}
        for chunk, twin in zip(self._own_chunks(method), method.twins.items(), strict=True):
            own |= {f"{chunk}.images": twin.images.contiguous(), f"{chunk}.labels": twin.labels.contiguous()}
        message = safetensors.torch.save(own)
        for rank in range(world.size):
            if Role.ADV in self._member.layout.role(rank):
                found |= safetensors.torch.load(world.broadcast(message, rank))
        return found


class TeamFeed:
    """An iterable of the arguments (now, ahead) of each step of an epoch.

    Args:
        method: the method of this rank.
        loader: yields the images of this rank.
    """

    def __init__(self, method: TeamMethod, loader: Iterable[Any]) -> None:
        self._method = method
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as for any iterable without a length

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        yield from self._method.begin_epoch(self._loader)


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
