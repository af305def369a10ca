"""A method whose steps the ranks of a team take together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from conadv.core.batch import Batch, Chunked, as_batch, count_chunks
from conadv.core.feed import Pair
from conadv.core.parts import Losses
from conadv.core.roles import Role
from conadv.core.share import TwinShare
from conadv.core.splitbn import update_running_stats
from conadv.core.state import State, below, pack, unpack

from .agreement import check_agreement
from .member import Member
from .outcome import NotFiniteError, Outcome, Unread
from .twins import put_in_flight, twins_in_flight
from .wire import Wire, wire_of


class TeamMethod:
    """What `conadv.Team.method` returns: called once per step on every rank, like any method.

    Args:
        member: the parts of this rank.
        model: the network.
        chunk_size: images per chunk.
        as_batch: from what the loader yields to a `Batch`; None: it yields (images, labels).
        share: the part of the chunks that has twins.
        seed: decides which.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        chunk_size: int,
        as_batch: Callable[[Any], Batch] | None,
        share: TwinShare,
        seed: int,
    ) -> None:
        self._member = member
        self._model = model
        self._chunk_size = chunk_size
        self._as_batch = as_batch
        self._share, self._seed = share, seed
        self._wire: Wire | None = None
        self._begin = self._end = 0  # the steps of the epoch
        self._done = 0  # steps of an epoch that a state was saved in
        self._versions: list[State] = []  # weights to generate the twins in flight with again
        self._twins: dict[int, Tensor] = {}  # twins in flight of a state that was loaded, by chunk
        self._seen: list[tuple[int, float]] = []  # of the weights, before each of the first two steps
        self._is_open = False  # a loss was returned, and its step is not over
        self._factors: list[Tensor] = []  # what the caller multiplied it by, in each backward pass
        self._scaled_alike = False  # whether all ranks were seen to multiply it by the same number

    @property
    def step(self) -> int:
        """How many steps were taken."""
        return self._member.method.step

    def feed(self, loader: Iterable[Any]) -> TeamFeed:
        """What the method is called with, step by step, in one epoch; every rank iterates it to the same step.

        Args:
            loader: yields the images of this rank, as with `team.sampler`; it has a length, the same on every rank.
                A rank that only learns from twins does not read from it.
        """
        return TeamFeed(self, loader)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        """Take a step up to the update: gradients and running statistics are those of all ranks when it returns.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.

        Returns:
            The mean losses over the whole batch, the same on all ranks.
        """
        self._check_ended()
        self._check_fed()
        self._check_updated()
        return self._take(self._member.step(now, ahead))

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        """The part that this rank has in the loss of a step, for a loop that scales it or calls backward itself.

        Backpropagate it once on every rank, then call `Team.all_reduce`. It holds the graph of all chunks. On a rank
        that only attacks it is 0.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.
        """
        self._check_ended()
        self._check_fed()
        self._check_updated()
        self._factors = []
        total = self._member.loss(now, ahead)
        total.register_hook(lambda factor: self._factors.append(factor.detach()))
        self._is_open = True
        return total

    def all_reduce(self) -> Losses:
        """End the step of `loss`; see `Team.all_reduce`."""
        if not self._is_open:
            raise ValueError(
                "no loss to end a step with: call it after method.loss(now, ahead) and its backward pass; "
                "method(now, ahead) sums the gradients itself"
            )
        if len(self._factors) != 1:
            times = len(self._factors)
            raise ValueError(
                f"the loss of this step was backpropagated {times} times: do it once, then team.all_reduce()"
            )
        if not self._scaled_alike:
            check_agreement(self._member.world, {"loss": {"the loss by": float(self._factors[0])}})
            self._scaled_alike = True
        self._is_open = False
        return self._take(self._member.end_loss(), scaled=True)

    def state_dict(self) -> State:
        """What the next step needs beside the weights, as tensors by name. Every rank calls it; rank 0 saves it.

        It resumes in any layout. With `ConAdv` it holds the weights of the last `delay` steps, and with `Recycled` the
        twins in flight.
        """
        self._check_ended()
        tensors: State = {}
        for number, version in enumerate(self._member.stale.versions() if self._is_attacked else []):
            tensors |= {f"stale.{number}.{name}": tensor for name, tensor in version.items()}
        if self._is_recycled and self.step:
            tensors |= {
                f"twins.{chunk}": message
                for chunk, message in twins_in_flight(self._member, self._format, self._chosen).items()
            }
        if not self._is_attacked and not self._is_recycled:
            inner = self._member.method.state_dict(all_ranks=self._member.world.size > 1)
            tensors |= {f"inner.{name}": tensor for name, tensor in inner.items()}
        about = {**self._identity(), "step": self.step, "done": self.step - self._begin, "open": self.step < self._end}
        return pack(about, tensors, own=False, all_ranks=False)

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore what `state_dict` returned on rank 0; every rank calls it, after the model has its weights.

        Returns:
            Steps that were taken in the epoch that was left, where its loader has to start
            (`sampler.set_epoch(epoch, start)`); 0 after the end of an epoch.
        """
        about, tensors = unpack(state, self._identity(), own=False)
        is_open = bool(about["open"])
        self._done = int(about["done"]) if is_open else 0
        self._end = about["step"]
        if self._is_recycled:
            self._twins = {int(chunk): message for chunk, message in below("twins.", tensors).items()}
            resume: Any = self._member.method.resume
            resume(about["step"], in_flight=bool(self._twins))
        elif self._is_attacked:
            self._member.method.resume(about["step"])
            found = {name.split(".")[1] for name in tensors if name.startswith("stale.")}
            versions = [below(f"stale.{number}.", tensors) for number in range(len(found))]
            if self._member.stale.versions():
                self._member.stale.load(versions)
            self._versions = versions if is_open else []
        else:
            self._member.method.load_state_dict(below("inner.", tensors))
        return self._done

    def close(self) -> None:
        """End the last epoch; all ranks have taken the same number of steps."""
        self._check_ended()
        self.drain()

    def _take(self, unread: Unread, scaled: bool = False) -> Losses:
        """Wait for the outcome of a step, and move the running statistics; the update is the caller's.

        Args:
            unread: its outcome.
            scaled: the caller may have scaled the loss until gradients overflowed, and then leaves the update out.
        """
        step, member = self.step - 1, self._member
        outcome = unread.read()  # before the caller's update, which we cannot take back
        member.check_weights(step, outcome)
        if outcome.culprits is not None:
            if not scaled or not self._is_overflow(outcome):
                member.exchange.discard()
                self.drain()
                raise NotFiniteError(
                    f"step {step}: {member.not_finite(outcome)} is not finite: lower the learning rate"
                )
            self._seen.clear()
        member.stale.keep()
        update_running_stats(self._model)
        return Losses(torch.tensor(outcome.clean_loss), torch.tensor(outcome.adv_loss))

    def _is_overflow(self, outcome: Outcome) -> bool:
        """Whether of a step only the gradients are not finite; the same on all ranks."""
        assert outcome.culprits is not None
        has_losses = "loss" not in outcome.culprits.values()
        return has_losses and self._member.exchange.has_finite_statistics()

    def _check_ended(self) -> None:
        if self._is_open:
            raise ValueError("the last step is not over: call team.all_reduce() after the backward pass of its loss")

    def _check_fed(self) -> None:
        """Refuse a step outside of an epoch that all ranks know of: nobody would send or expect its twins."""
        if self._member.handoff is not None and not self._begin <= self.step < self._end:
            raise ValueError("no epoch has begun: take the batches from `method.feed(loader)`, in each epoch")

    def _check_updated(self) -> None:
        """Warn before the second step if nothing updated the weights: the gradients of the first are cleared."""
        if len(self._seen) == 2:
            return
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        # PyTorch's counters of changes; an optimizer that writes to `.data` does not move them.
        self._seen.append((sum(weight._version for weight in weights), float(weights[-1].detach().double().sum())))
        if self._seen[0] == self._seen[-1] and len(self._seen) == 2:
            warnings.warn(
                "the weights were not updated since the last step, and a Team clears the gradients in each: update "
                "after each call, and accumulate with a larger batch_size of the Team, in chunks of chunk_size images",
                stacklevel=3,
            )

    def drain(self) -> None:
        """Wait for every message that is under way; all ranks have taken the same number of steps."""
        self._member.drain()

    def begin_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Agree on the epoch with the other ranks; the batches of this rank."""
        self._check_ended()
        if not isinstance(loader, Sized):
            raise ValueError("a Team needs a loader with a length, since some ranks do not read from it")
        steps = len(loader)
        world = self._member.world
        check_agreement(world, {"data": {"batches": steps}})
        handoff = self._member.handoff
        if handoff is not None and self.step < self._end:  # the last epoch was left in its middle
            handoff.cancel()
        self._forget_unfinished_epoch()
        batches = self._own_batches(loader, steps)
        self._begin, self._end, self._done = self.step - self._done, self.step + steps, 0
        if handoff is not None:
            handoff.announce(self.step, self._end)
        if self._wire is None and Role.ADV in self._member.layout.duties:
            batches = self._agree_on_wire(batches)
        if self._twins:
            put_in_flight(self._member, self._format, self._chosen, self._twins)
            self._twins = {}
        versions, self._versions = self._versions, []
        return _with_versions(self._model, versions, batches) if self._attacks_ahead else batches

    @property
    def _is_attacked(self) -> bool:
        return Role.ATTACK in self._member.layout.duties

    @property
    def _is_recycled(self) -> bool:
        duties = self._member.layout.duties
        return Role.ADV in duties and Role.ATTACK not in duties

    @property
    def _attacks_ahead(self) -> bool:
        return self._member.place.role == Role.ATTACK

    @property
    def _format(self) -> Wire:
        assert self._wire is not None
        return self._wire

    def _chosen(self, lane: int, number: int) -> bool:
        """Whether a chunk of the last batch has twins, counted from the first chunk of its lane."""
        return self._share.has(self._seed, self.step - 1, lane, number)

    def _identity(self) -> dict[str, Any]:
        method = self._member.method
        names = {"method": f"Team {type(method).__name__}", "delay": method.delay}
        return {**names, "chunk_size": self._chunk_size, "twin_share": float(self._share), "seed": self._seed}

    def _forget_unfinished_epoch(self) -> None:
        """Twins of a new epoch are made with its first weights; none are left of an epoch that was not finished."""
        if not self._is_attacked or self._versions:
            return
        self._member.method.resume(self.step)
        self._member.stale.reset()

    def _own_batches(self, loader: Iterable[Any], steps: int) -> Iterator[Any]:
        if not self._member.place.role & (Role.CLEAN | Role.ATTACK):
            return repeat(None, steps)
        return map(self._checked, loader)

    def _checked(self, item: Any) -> Batch | Chunked:
        """What the loader yielded, which has to be this rank's part of a batch."""
        batch = item if isinstance(item, Batch | Chunked) else (self._as_batch or as_batch)(item)
        place = self._member.place
        assert place.chunks is not None
        if count_chunks(batch, self._chunk_size) != place.chunks:
            who, size = self._member.layout.describe(self._member.world.rank), place.chunks * self._chunk_size
            raise ValueError(f"{who} needs batches of {size} images: take the batches from team.sampler")
        if isinstance(batch, Batch) and batch.extra and self._member.handoff is not None:
            raise ValueError(
                "extra inputs do not travel with twins: take a layout that learns from them where they are made"
            )
        return batch

    def _agree_on_wire(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Learn from a rank that makes twins how one of them looks; the batches, none of them missing."""
        member = self._member
        maker = member.layout.ranks(0, member.layout.maker())[0]
        first = next(batches, None)
        described = b""
        if member.world.rank == maker and first is not None:
            described = json.dumps(self._describe(first).to_json()).encode()
        found = json.loads(member.world.broadcast(described, maker) or b"null")
        if found is None:
            return batches
        self._wire = Wire.from_json(found)
        if member.handoff is not None:
            member.handoff.wire = self._wire
        return chain([first], batches)

    def _describe(self, batch: Batch | Chunked) -> Wire:
        if isinstance(batch, Chunked):
            raise ValueError("a Team needs batches that are whole: yield (images, labels) or a conadv.Batch")
        attack = getattr(self._member.method, "attack", None)
        exact = attack is not None and attack.exact_as_bytes(from_images=self._is_recycled)
        return wire_of(batch, self._chunk_size, next(self._model.parameters()).dtype, exact)


class TeamFeed:
    """The pairs that a team's method is called with in one epoch.

    Args:
        method: of this rank.
        loader: of this rank's images.
    """

    def __init__(self, method: TeamMethod, loader: Iterable[Any]) -> None:
        self._method = method
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as for any iterable without a length

    def __iter__(self) -> Iterator[Pair]:
        batches = self._method.begin_epoch(self._loader)
        yield from self._method._member.method.feed(batches)


def _with_versions(model: nn.Module, versions: list[State], batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; while one of the first is attacked, the model has the weights that its twins were made with."""
    current = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} if versions else {}
    number = -1
    for number, batch in enumerate(batches):
        if number <= len(versions) and versions:
            model.load_state_dict(versions[number] if number < len(versions) else current)
        yield batch
    if versions and number < len(versions):
        model.load_state_dict(current)
