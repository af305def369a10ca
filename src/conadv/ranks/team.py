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

from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack
from itertools import chain
from typing import Any, NoReturn, Self

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from conadv import last_words
from conadv.core.attack import Loss
from conadv.core.batch import Batch, Chunked, count_chunks
from conadv.core.splitbn import update_running_stats
from conadv.core.state import State, below
from conadv.core.step import Losses
from conadv.core.twins import as_share
from conadv.roles import Place
from conadv.wrappers import is_exchanged

from .agreement import check_agreement
from .faults import guarded
from .launch import world_size
from .layout import Layout
from .mail import Wire
from .member import Member, Outcome, StepError
from .sampler import TeamSampler
from .world import World, joined

_RANK = "rank."  # before the number of a rank, in a state that holds one for each


class Team:
    """The ranks of a layout, in your own training loop; a context manager.

    It uses the default process group if there is one; otherwise it creates one from the environment of
    torchrun. Within the context, if a rank raises an error, crashes or hangs, all ranks end and one line names it.

    Args:
        layout: the role of each rank of a lane, such as "clean | adv | attack" or "3 clean | 3 adv | 2 attack".
            None: every rank does everything.
        batch_size: images per step, over all ranks.
        chunk_size: images per forward pass, which share BatchNorm statistics. Results depend on it, but not on the
            layout.
        seed: the seed of everything random in the method and of the order of `sampler`; the same on all ranks.
        timeout: seconds to wait for another rank before all ranks end.
    """

    world: World
    """The ranks: `rank`, `size`, `device`, and `is_main`, which is true on the first rank that learns."""
    place: Place
    """The role of this rank, and which chunks of a batch it sees."""

    def __init__(
        self, layout: str | None = None, *, batch_size: int, chunk_size: int, seed: int = 0, timeout: float = 600.0
    ) -> None:
        if chunk_size < 1 or batch_size < 1 or batch_size % chunk_size:
            raise ValueError(
                f"a batch of {batch_size} images is not a whole number of chunks of {chunk_size}: "
                "choose a chunk_size that divides batch_size"
            )
        self._flags = {"layout": layout, "batch_size": batch_size, "chunk_size": chunk_size, "seed": seed}
        self._text, self._seed, self._timeout = layout, seed, timeout
        self._batch_size, self._chunk_size, self._chunks = batch_size, chunk_size, batch_size // chunk_size
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        size = dist.get_world_size() if dist.is_initialized() else world_size()
        self._layout = layout = Layout.fit(self._text, world_size=size)
        layout.check(self._chunks)
        with ExitStack() as stack:
            self.world = world = stack.enter_context(joined(self._timeout, main=layout.learners()[0]))
            self.place = layout.place(world.rank, self._chunks)
            if size > 1:
                stack.enter_context(last_words.witnessed(layout.describe(world.rank)))
            stack.enter_context(guarded(world, layout, (StepError,), raises=True))
            check_agreement(world, {"flags": {**self._flags, "torch": torch.__version__}})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def sampler(self, data: Sized, shuffle: bool = True) -> TeamSampler:
        """Return a batch sampler that yields the images of this rank: `DataLoader(data, batch_sampler=...)`.

        Args:
            data: the data set, of which only the length is used.
            shuffle: whether to shuffle in each epoch (`set_epoch`); False: keep the order of the data set.
        """
        own, size = self._layout.chunks(self.world.rank, self._chunks), self._chunk_size
        return TeamSampler(data, self._batch_size, slice(own.start * size, own.stop * size), self._seed, shuffle)

    def method(self, factory: Any, model: nn.Module, loss: Loss, *arguments: Any, **options: Any) -> TeamMethod:
        """Build a method whose steps all ranks take together; every rank must call it, and all get the same weights.

        Args:
            factory: `conadv.ConAdv`, `Recycled`, `Vanilla` or `Sam`.
            model: the network, on the device of this rank, after `split_batchnorm`, and not wrapped in
                DistributedDataParallel.
            loss: computes the mean loss over the images from outputs and labels.
            arguments: further positional arguments of the method, such as the attack.
            options: keyword arguments of the method, such as `delay`, `twin_share`, `autocast` and `batch`;
                `chunk_size` and `seed` are those of the Team.
        """
        if is_exchanged(model):
            raise ValueError("a Team sums gradients itself: pass the model without DistributedDataParallel or FSDP")
        layout = Layout.fit(self._text, factory.duties, self.world.size)
        layout.check(self._chunks, as_share(options.get("twin_share", 1)), options.get("shuffle_twins", 1))
        self.world.broadcast_tensors([*model.parameters(), *model.buffers()])
        method = factory(model, loss, *arguments, **options, chunk_size=self._chunk_size, seed=self._seed)
        check_agreement(self.world, {"method": method._compared()})
        if method.twins.per_rank:  # its state can be loaded in this layout only
            method._step.fixed["layout"] = str(layout)
        made = TeamMethod(Member(self.world, layout, model, method, chunks=self._chunks), model, self._chunk_size)
        self._stack.push(lambda *error: made.close() if error[0] is None else None)
        return made


class TeamMethod:
    """The method that `conadv.Team.method` returns; every rank calls it once per step."""

    def __init__(self, member: Member, model: nn.Module, chunk_size: int) -> None:
        self._member, self._model, self._chunk_size = member, model, chunk_size
        self._method, self._hands_over = member.method, member.layout.hands_over
        self._begin = self._end = self._done = 0  # of the epoch: first step, end, and steps taken before a resume
        self._unread: Outcome | None = None

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._method.step

    def feed(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield the arguments of each step of an epoch; every rank must iterate to the same step.

        Args:
            loader: yields the images of this rank, as with `team.sampler`. Its length is the same on every rank.
        """
        self._settle()
        if not isinstance(loader, Sized):
            raise ValueError("a Team needs a loader with a length, which all ranks compare")
        check_agreement(self._member.world, {"data": {"batches": len(loader)}})
        self._begin, self._end, self._done = self.step - self._done, self.step + len(loader), 0
        batches, post = map(self._checked, loader), self._member.post
        if self._hands_over and post.wire is None and (first := next(batches, None)) is not None:
            post.wire = Wire.of(first, self._chunk_size, self._method)
            batches = chain([first], batches)  # type: ignore[assignment]
        yield from self._member.feed(batches, self._end)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        """Take a step up to the update, and return the mean losses over the whole batch; 0 on ranks that only attack.

        Gradients and running statistics are those of all ranks afterwards. A rank that only attacks has none, so that
        an update does nothing there; weights come with the next call. A number that is not finite is an error in the
        next call, at the latest when the Team closes.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.
        """
        if self._hands_over and not self._begin <= self.step < self._end:  # others would neither send nor receive
            raise ValueError("no epoch has begun: take the batches from `method.feed(loader)`, in each epoch")
        outcome = self._member.step(now, ahead)
        self._settle()  # one step late, so that the host does not wait for the device
        self._unread = outcome
        update_running_stats(self._model)
        return outcome.losses

    def loss(self, now: Any, ahead: Any = None) -> NoReturn:
        raise ValueError("a Team runs the backward pass itself: call method(now, ahead) and drop loss.backward()")

    def state_dict(self) -> State:
        """Return what the next step needs besides the weights, as tensors by name. Every rank must call it.

        The rank `team.world.is_main` saves it. With `ConAdv` it contains the weights of the last `delay` steps, and
        resumes in any layout. With `Recycled` it contains the twins of all ranks, and resumes in the same layout.
        """
        self._settle()
        state, world = self._method.state_dict(), self._member.world
        if self._method.twins.per_rank:
            own = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
            parts = [bytearray(world.broadcast(own, rank)) for rank in range(world.size)]
            state = {f"{_RANK}{rank}": torch.frombuffer(part, dtype=torch.uint8) for rank, part in enumerate(parts)}
        done = self.step - self._begin if self.step < self._end else 0
        return {**state, "done": torch.tensor(done)}

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore what `state_dict` returned. Every rank must call it, after loading the model's weights.

        Returns:
            How many steps of the epoch were taken, so that its loader can start there
            (`sampler.set_epoch(epoch, start)`); 0 at the end of an epoch.
        """
        own = dict(state)
        self._done = int(own.pop("done", 0))
        if parts := below(_RANK, own):
            part = parts.get(str(self._member.world.rank), parts["0"])  # which is refused: it is of another layout
            own = safetensors.torch.load(part.cpu().numpy().tobytes())
        self._method.load_state_dict(own)
        self._begin = self._end = self.step
        return self._done

    def close(self) -> None:
        """Wait for messages in flight; all ranks must have taken the same number of steps."""
        self._settle()
        self._member.drain()

    def _settle(self) -> None:
        """Read the outcome of the last step, unless that was done; raise an error if it is not finite."""
        unread, self._unread = self._unread, None
        if unread is not None:
            unread.read()

    def _checked(self, item: Any) -> Batch | Chunked:
        """Convert an item of the loader to a batch, and check that it has the chunks of this rank."""
        batch, member = self._method._step.batch(item), self._member
        if count_chunks(batch, self._chunk_size) != member.place.chunks:
            who = member.layout.describe(member.world.rank)
            wanted = f"{member.place.chunks} chunks of {self._chunk_size} images"
            raise ValueError(f"{who} needs batches of {wanted}: take the batches from team.sampler")
        return batch
