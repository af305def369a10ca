"""Check that all ranks of a data-parallel loop have the same method and train one model.

Settings are compared through the store of the process group, without a collective: a rank that has no method would
answer a collective with a gradient, or not at all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .wrappers import data_parallel, group_size, is_sharded, unwrap

# The calls before which ranks are compared, first settings, then weights: accumulation may change none at first.
COMPARED = (0, 1, 2, 4, 8, 16, 32, 64)


def check_ranks(
    model: nn.Module, calls: int, settings: Callable[[], Mapping[str, Any]], chunk_size: int | None
) -> bool:
    """Refuse ranks whose methods differ, and warn if nothing synchronizes their weights.

    Args:
        model: the network; the process group is that of its wrapper, or else of all ranks.
        calls: of the method so far, in this process.
        settings: what has to be the same on all ranks, as JSON values.
        chunk_size: images per chunk, which may differ unless the weights are sharded: then each pass is a collective.

    Returns:
        Whether their weights are equal, as far as they were compared.
    """
    parallel, is_split = data_parallel(model), is_sharded(model)
    group, size = group_size(None if parallel is None else parallel.process_group)
    if size == 1 or (is_split and _mesh_size(model) != dist.get_world_size()):
        return True
    exchanged = parallel is not None or is_split
    compared = {**settings(), "chunk_size": chunk_size} if is_split else settings()
    if calls == (0 if exchanged else 1) and (found := difference(group, compared)):
        text = f"the methods of the ranks differ: {found}; create them with the same arguments on every rank"
        if exchanged:
            raise ValueError(text)
        warnings.warn(text, stacklevel=6)
    return calls == 0 or is_split or _same_weights(model, group)


def difference(group: Any, settings: Mapping[str, Any]) -> str:
    """Describe how the settings of the ranks differ; empty if they do not. Every rank of the group must call it."""
    store = dist.distributed_c10d._get_default_store()
    if store is None or dist.get_backend(group) == "fake":
        return ""
    store = dist.distributed_c10d.PrefixStore(f"conadv-settings-{group.group_name}", store)
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    turn = store.add(f"turns/{rank}", 1)  # there may be several methods, one after the other
    keys = {other: f"{turn}/{other}" for other in ranks}
    store.set(keys[rank], json.dumps(settings, default=lambda value: type(value).__name__))
    if rank == ranks[0]:
        _wait(store, list(keys.values()), keys)
        store.set(f"{turn}/found", _compare({other: json.loads(store.get(key)) for other, key in keys.items()}))
    _wait(store, [f"{turn}/found"], keys)
    return store.get(f"{turn}/found").decode()


def _wait(store: Any, wanted: list[str], keys: Mapping[int, str]) -> None:
    limit: timedelta = store.timeout
    try:
        store.wait(wanted, limit)
    except dist.DistStoreError:
        missing = ", ".join(f"rank {rank}" for rank, key in keys.items() if not store.check([key]))
        raise ValueError(
            f"waited {limit.total_seconds():g} seconds for the first step of {missing or 'another rank'} with a "
            "method: create the same method on every rank, and call it in every step in place of the plain loss"
        ) from None


def _compare(found: Mapping[int, Mapping[str, Any]]) -> str:
    first, leading = next(iter(found.items()))
    for rank, own in found.items():
        for name in {**leading, **own}:
            if own.get(name) != leading.get(name):
                return f"{name} is {leading.get(name)} on rank {first} and {own.get(name)} on rank {rank}"
    return ""


def _same_weights(model: nn.Module, group: Any) -> bool:
    own = torch.stack([parameter.detach().double().sum() for parameter in unwrap(model).parameters()]).sum()
    bounds = torch.stack([own, -own])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    if float(bounds.sum()) == 0:
        return True
    warnings.warn(
        f"the weights of the {dist.get_world_size(group)} ranks differ: nothing synchronizes their gradients; wrap "
        "the model in DistributedDataParallel after split_batchnorm, and create the method with the wrapped "
        "model",
        stacklevel=7,
    )
    return False


def _mesh_size(model: nn.Module) -> int:
    """How many ranks share the weights of a sharded model."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return max((mesh.size() for mesh in meshes if mesh is not None), default=0)
