"""The state of a method besides the weights, packed as tensors by name for torch.save or safetensors.

A state says which method and seed it is of, and refuses others; one with twins in flight, which belong to one rank,
also says which rank of how many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conadv.wrappers import gathered, rank_and_size

_ABOUT = "about"
_RANKS = "ranks."

State = dict[str, Tensor]


def pack(about: Mapping[str, Any], tensors: Mapping[str, Tensor], own: bool, all_ranks: bool) -> State:
    """Pack a state as tensors by name: `about` identifies the method, with its counters.

    `own`: the tensors belong to this rank alone; `all_ranks`: those of every rank are gathered, and all ranks call it.
    """
    rank, size = rank_and_size() if own else (None, None)
    shared = own and all_ranks and (size or 1) > 1
    described = {**about, "rank": None if shared else rank, "world_size": size}
    packed = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    if shared:
        packed = {f"{_RANKS}{name}": gathered(tensor, size or 1) for name, tensor in packed.items()}
    return {_ABOUT: torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8), **packed}


def unpack(state: Mapping[str, Any], about: Mapping[str, Any], own: bool) -> tuple[dict[str, Any], State]:
    """Unpack a state, after checking that it is of the method that `about` identifies and, if `own`, of this rank."""
    try:
        found = json.loads(bytes(state[_ABOUT].tolist()))
        names = ["method"] if found["method"] != about["method"] else list(about)
        other = [name for name in names if found[name] != about[name]]
    except (KeyError, AttributeError, ValueError, TypeError):
        raise ValueError("not the state of a method: pass what method.state_dict() returned") from None
    if other:
        told = ", ".join(f"{name} {found[name]} instead of {about[name]}" for name in other)
        raise ValueError(f"the state is of another method: it has {told}")
    rank, size = rank_and_size()
    if own and ((found["world_size"] or 1) != size or found["rank"] not in (None, rank)):
        whose = "all ranks" if found["rank"] is None else f"rank {found['rank']}"
        raise ValueError(
            f"the state holds the twins of {whose} of {found['world_size']}, this is rank {rank} of {size}: start as "
            "many, and save one state per rank, or method.state_dict(all_ranks=True), called on all of them"
        )
    tensors = {name: tensor for name, tensor in state.items() if name != _ABOUT and not name.startswith(_RANKS)}
    return found, tensors | {name: tensor[rank] for name, tensor in below(_RANKS, state).items()}


def below(prefix: str, tensors: Mapping[str, Tensor]) -> State:
    """The tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
