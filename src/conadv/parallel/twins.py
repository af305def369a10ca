"""The twins in flight of all ranks, gathered for a state that resumes in any layout, and put in flight again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from conadv.core.handoff import Queue
from conadv.core.roles import Role

from .member import Member
from .wire import Wire

# Whether a chunk has twins: of the lane that starts at this chunk, and the chunk counted from there.
Chosen = Callable[[int, int], bool]


def twins_in_flight(member: Member, wire: Wire, chosen: Chosen) -> dict[int, Tensor]:
    """The twins of one batch that are in flight, as they cross, by chunk. Every rank calls it.

    Args:
        member: the parts of this rank.
        wire: how twins cross.
        chosen: which chunks have twins.
    """
    world = member.world
    own = b"".join(message.cpu().numpy().tobytes() for message in _own(member, wire))
    found: dict[int, Tensor] = {}
    for rank in range(world.size):
        chunks = _chunks(member, rank, chosen)
        if Role.ADV in member.layout.role(rank) and chunks:
            data = torch.frombuffer(bytearray(world.broadcast(own, rank)), dtype=torch.uint8)
            found |= dict(zip(chunks, data.split(wire.size), strict=True))
    return found


def put_in_flight(member: Member, wire: Wire, chosen: Chosen, twins: Mapping[int, Tensor]) -> None:
    """Give this rank those of the twins that it learns from next."""
    if member.handoff is not None:
        member.handoff.adopt(twins)
        return
    queue = _queue(member)
    for chunk in _chunks(member, member.world.rank, chosen):
        queue.put(wire.unpack(twins[chunk].to(member.world.device)))


def _own(member: Member, wire: Wire) -> list[Tensor]:
    if member.handoff is not None:
        return member.handoff.arrived()
    return [wire.pack(twin) for twin in _queue(member).twins()]


def _queue(member: Member) -> Queue:
    queue = member.method.handoff  # type: ignore[attr-defined]
    assert isinstance(queue, Queue)
    return queue


def _chunks(member: Member, rank: int, chosen: Chosen) -> list[int]:
    """The chunks with twins that a rank works through."""
    assert member.place.chunks is not None
    total = round(member.place.chunks / member.place.share)
    lane = member.layout.lane_chunks(rank, total).start
    return [chunk for chunk in member.layout.chunks(rank, total) if chosen(lane, chunk - lane)]
