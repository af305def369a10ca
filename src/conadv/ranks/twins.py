"""Gather the twins in flight from all ranks, for a state that resumes in any layout, and restore them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from conadv.core.roles import Role

from .member import Member
from .source import LeftOnRanks
from .wire import Wire

# Whether a chunk has twins, from the first chunk of its lane and its number within the lane.
Chosen = Callable[[int, int], bool]


def twins_in_flight(member: Member, wire: Wire, chosen: Chosen) -> dict[int, Tensor]:
    """Gather the twins in flight of one batch, as messages by chunk. Every rank must call it.

    Args:
        member: this rank.
        wire: the message format.
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
    """Put the twins that this rank learns from next in flight, out of those of all ranks."""
    if member.handoff is not None:
        member.handoff.adopt(twins)
        return
    chunks = _chunks(member, member.world.rank, chosen)
    _left(member).adopt([wire.unpack(twins[chunk].to(member.world.device)) for chunk in chunks])


def _own(member: Member, wire: Wire) -> list[Tensor]:
    if member.handoff is not None:
        return member.handoff.arrived()
    return [wire.pack(twin) for twin in _left(member).twins()]


def _left(member: Member) -> LeftOnRanks:
    assert isinstance(member.twins, LeftOnRanks)
    return member.twins


def _chunks(member: Member, rank: int, chosen: Chosen) -> list[int]:
    """Return the chunks of a rank that have twins."""
    assert member.place.chunks is not None
    total = round(member.place.chunks / member.place.share)
    lane = member.layout.lane_chunks(rank, total).start
    return [chunk for chunk in member.layout.chunks(rank, total) if chosen(lane, chunk - lane)]
