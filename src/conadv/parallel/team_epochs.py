"""What a rank of a team begins an epoch with: its batches, the twins in flight, and how they cross."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import chain, repeat
from typing import Any

from torch import Tensor, nn

from conadv.core.batch import Batch, Chunked, as_batch, count_chunks
from conadv.core.roles import Role
from conadv.core.state import State, below

from .agreement import check_agreement
from .member import Member
from .twins import put_in_flight, twins_in_flight
from .wire import Wire, wire_of


class TeamEpochs:
    """The epochs of a team's method, on one rank.

    Args:
        member: the parts of this rank.
        model: the network.
        chunk_size: images per chunk.
        as_batch: from what the loader yields to a `Batch`; None: it yields (images, labels).
        has_twins: whether a chunk of the batch of a step has twins, from the step, the lane and the chunk's number
            there.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        chunk_size: int,
        as_batch: Callable[[Any], Batch] | None,
        has_twins: Callable[[int, int, int], bool],
    ) -> None:
        self._member, self._model = member, model
        self._chunk_size, self._as_batch, self._has_twins = chunk_size, as_batch, has_twins
        self._wire: Wire | None = None
        self._begin = self._end = 0  # the steps of the epoch
        self._done = 0  # steps of an epoch that a state was saved in
        self._versions: list[State] = []  # weights to generate the twins in flight with again
        self._twins: dict[int, Tensor] = {}  # twins in flight of a state that was loaded, by chunk

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Agree on an epoch with the other ranks; the batches of this rank."""
        if not isinstance(loader, Sized):
            raise ValueError("a Team needs a loader with a length, since some ranks do not read from it")
        steps = len(loader)
        check_agreement(self._member.world, {"data": {"batches": steps}})
        handoff = self._member.handoff
        if handoff is not None and self._step < self._end:  # the last epoch was left in its middle
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
        return _with_versions(self._model, versions, batches) if self._attacks_only else batches

    def check_begun(self) -> None:
        """Refuse a step outside an epoch: the other ranks would neither send nor expect its twins."""
        if self._member.handoff is not None and not self._begin <= self._step < self._end:
            raise ValueError("no epoch has begun: take the batches from `method.feed(loader)`, in each epoch")

    def save(self) -> tuple[dict[str, Any], State]:
        """Where the epoch is, and what the next step needs beside the weights."""
        tensors: State = {}
        for number, version in enumerate(self._member.stale.versions() if self._is_attacked else []):
            tensors |= {f"stale.{number}.{name}": tensor for name, tensor in version.items()}
        if self._is_recycled and self._step:
            found = twins_in_flight(self._member, self._format, self._is_chosen)
            tensors |= {f"twins.{chunk}": message for chunk, message in found.items()}
        if not self._is_attacked and not self._is_recycled:
            inner = self._member.method.state_dict(all_ranks=self._member.world.size > 1)
            tensors |= {f"inner.{name}": tensor for name, tensor in inner.items()}
        return {"step": self._step, "done": self._step - self._begin, "open": self._step < self._end}, tensors

    def load(self, about: dict[str, Any], tensors: State) -> int:
        """Restore what `save` returned on rank 0; the steps that were taken in the epoch that was left."""
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

    @property
    def _step(self) -> int:
        return self._member.method.step

    @property
    def _is_attacked(self) -> bool:
        return Role.ATTACK in self._member.layout.duties

    @property
    def _is_recycled(self) -> bool:
        return Role.ADV in self._member.layout.duties and not self._is_attacked

    @property
    def _attacks_only(self) -> bool:
        return self._member.place.role == Role.ATTACK

    @property
    def _format(self) -> Wire:
        assert self._wire is not None
        return self._wire

    def _is_chosen(self, lane: int, number: int) -> bool:
        """Whether a chunk of the last batch has twins, counted from the first chunk of its lane."""
        return self._has_twins(self._step - 1, lane, number)

    def _forget_unfinished(self) -> None:
        """Twins of a new epoch are made with its first weights; none are left of an epoch that was not finished."""
        if not self._is_attacked or self._versions:
            return
        self._member.method.resume(self._step)
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
