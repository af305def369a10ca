"""The epochs of a team's method: the batches of this rank, the twins in flight and their message format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, repeat
from typing import Any

from torch import Tensor, nn

from conadv.core.batch import Batch, Chunked, as_batch, count_chunks
from conadv.core.roles import Role
from conadv.core.state import State, below
from conadv.core.twins import without_wrappers
from conadv.wrappers import innermost

from .agreement import check_agreement
from .member import Member
from .traffic import HasTwins
from .twins import put_in_flight, twins_in_flight
from .wire import Wire, wire_of


class TeamEpochs:
    """The epochs of a team's method, on one rank.

    Args:
        member: this rank.
        model: the network.
        chunk_size: images per chunk.
        as_batch: converts what the loader yields to a `Batch`; None: it yields (images, labels).
        has_twins: which chunks have twins.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        chunk_size: int,
        as_batch: Callable[[Any], Batch] | None,
        has_twins: HasTwins,
    ) -> None:
        self._member, self._model = member, model
        self._chunk_size, self._as_batch, self._has_twins = chunk_size, as_batch, has_twins
        self._wire: Wire | None = None
        self._begin = self._end = 0  # first step of the epoch, and the one after its last
        # From a state that was loaded, until the next epoch begins
        self._done = 0  # steps of the epoch that were taken already
        self._versions: list[State] = []  # stale weights to regenerate the twins in flight with
        self._twins: dict[int, Tensor] = {}  # twins in flight, by chunk

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch on all ranks, and return the batches of this rank."""
        if not isinstance(loader, Sized):
            raise ValueError("a Team needs a loader with a length, since some ranks do not read from it")
        steps = len(loader)
        check_agreement(self._member.world, {"data": {"batches": steps}})
        handoff = self._member.handoff
        if handoff is not None and self._step < self._end:  # the last epoch was not finished
            handoff.cancel()
        self._forget_unfinished()
        batches = self._own_batches(loader, steps)
        self._begin, self._end, self._done = self._step - self._done, self._step + steps, 0
        if handoff is not None:
            handoff.announce(self._step, self._end)
        if self._wire is None and Role.ADV in self._member.layout.duties:
            batches = self._agree_on_wire(batches)
        if self._twins:
            put_in_flight(self._member, self._format, self._is_chosen, self._twins)
            self._twins = {}
        versions, self._versions = self._versions, []
        attacks_only = self._member.place.role == Role.ATTACK
        return _with_versions(self._model, versions, batches) if versions and attacks_only else batches

    def check_begun(self) -> None:
        """Raise a ValueError outside an epoch, where other ranks would neither send nor receive twins."""
        if self._member.handoff is not None and not self._begin <= self._step < self._end:
            raise ValueError("no epoch has begun: take the batches from `method.feed(loader)`, in each epoch")

    def save(self) -> tuple[dict[str, Any], State]:
        """Return the position in the epoch, and the tensors that the next step needs in addition to the weights."""
        tensors: State = {}
        for number, version in enumerate(self._member.stale.versions() if self._has_attack else []):
            tensors |= {f"stale.{number}.{name}": tensor for name, tensor in version.items()}
        if self._is_recycled and self._step:
            found = twins_in_flight(self._member, self._format, self._is_chosen)
            tensors |= {f"twins.{chunk}": message for chunk, message in found.items()}
        if not self._has_attack and not self._is_recycled:
            inner = self._member.method.state_dict(all_ranks=self._member.world.size > 1)
            tensors |= {f"inner.{name}": tensor for name, tensor in inner.items()}
        return {"step": self._step, "done": self._step - self._begin, "open": self._step < self._end}, tensors

    def load(self, about: dict[str, Any], tensors: State) -> int:
        """Restore what `save` returned on rank 0; return how many steps of the epoch were taken."""
        is_open = bool(about["open"])
        self._done = int(about["done"]) if is_open else 0
        self._end = about["step"]
        if self._is_recycled:
            self._twins = {int(chunk): message for chunk, message in below("twins.", tensors).items()}
            self._member.resume(about["step"], in_flight=bool(self._twins))
        elif self._has_attack:
            self._member.resume(about["step"])
            found = {name.split(".")[1] for name in tensors if name.startswith("stale.")}
            versions = [below(f"stale.{number}.", tensors) for number in range(len(found))]
            if self._member.stale.versions():
                self._member.stale.load(versions)
            self._versions = versions if is_open else []
        else:
            self._member.method.load_state_dict(below("inner.", tensors))
        return self._done

    @property
    def _step(self) -> int:
        return self._member.method.step

    @property
    def _has_attack(self) -> bool:
        return Role.ATTACK in self._member.layout.duties

    @property
    def _is_recycled(self) -> bool:
        """Whether twins come from the clean backward pass."""
        return Role.ADV in self._member.layout.duties and not self._has_attack

    @property
    def _format(self) -> Wire:
        assert self._wire is not None
        return self._wire

    def _is_chosen(self, lane: int, number: int) -> bool:
        """Whether a chunk of the last batch has twins; see `has_twins`."""
        return self._has_twins(self._step - 1, lane, number)

    def _forget_unfinished(self) -> None:
        """Start a new epoch with the current weights as stale weights, and without twins of an unfinished epoch."""
        if not self._has_attack or self._versions:
            return
        self._member.resume(self._step)
        self._member.stale.reset()

    def _own_batches(self, loader: Iterable[Any], steps: int) -> Iterator[Any]:
        if not self._member.place.role & (Role.CLEAN | Role.ATTACK):
            return repeat(None, steps)
        return map(self._checked, loader)

    def _checked(self, item: Any) -> Batch | Chunked:
        """Convert an item of the loader to a batch, and check that it has the chunks of this rank."""
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
        """Broadcast the message format from a rank that generates twins, which needs its first batch for it.

        Returns:
            The batches, including the first one.
        """
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


def _with_versions(model: nn.Module, versions: list[State], batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; the model has one of `versions` as weights while each of the first batches is attacked."""
    inner = innermost(model)  # stale weights have the names that they have without wrappers
    current = {name: tensor.detach().clone() for name, tensor in inner.state_dict().items()}
    named = [without_wrappers(version, set(current)) for version in versions]
    number = -1
    for number, batch in enumerate(batches):
        if number <= len(named):
            inner.load_state_dict(named[number] if number < len(named) else current)
        yield batch
    if number < len(named):
        inner.load_state_dict(current)
