"""Weights of earlier steps, kept so that twins can be generated with them later."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .wrappers import innermost

# What wrappers put before the names of a model's tensors: torch.compile, DistributedDataParallel and DataParallel.
_PREFIXES = re.compile(r"^(_orig_mod\.|module\.)+")


class StaleWeights:
    """The weights and buffers of the last `delay` steps: what twins in flight were generated with.

    A copy of the weights replaces a batch of twins: in a checkpoint, which therefore does not grow with the batch,
    and in memory, if one process attacks and learns.

    Args:
        model: the network, whose weights `keep` copies.
        delay: how many versions to keep.
    """

    def __init__(self, model: nn.Module, delay: int) -> None:
        self._model = model
        self._kept = deque({name: own.detach().clone() for name, own in self._own().items()} for _ in range(delay))

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current weights, before an update, over the oldest version."""
        if self._kept:
            self._kept.rotate(-1)
            self._copy(self._own(), self._kept[-1])

    @contextmanager
    def swapped_in(self, number: int = 0) -> Iterator[None]:
        """Give the model one of the versions, within this context; by default the weights of `delay` steps ago."""
        self._swap(self._kept[number])
        try:
            yield
        finally:
            self._swap(self._kept[number])

    @torch.no_grad()
    def reset(self) -> None:
        """Set every version to the current weights."""
        for kept in self._kept:
            self._copy(self._own(), kept)

    def versions(self) -> list[dict[str, Tensor]]:
        """The kept versions, oldest first."""
        return list(self._kept)

    @torch.no_grad()
    def extend(self) -> None:
        """Keep one more version, at first a copy of the oldest."""
        self._kept.appendleft({name: kept.clone() for name, kept in self._kept[0].items()})

    def trained(self) -> list[Tensor]:
        """The trainable weights of the model, this rank's part of each."""
        return [_local(own.detach()) for own in self._own().values() if own.requires_grad]

    def is_newest(self) -> bool:
        """Whether the trainable weights are equal to those of the newest version."""
        own, newest = self._own(), self._kept[-1]
        _follow(newest, own)
        trained = [name for name, tensor in own.items() if tensor.requires_grad]
        return all(torch.equal(_local(own[name].detach()), _local(newest[name])) for name in trained)

    @torch.no_grad()
    def load(self, versions: list[dict[str, Tensor]]) -> None:
        """Restore what `versions` returned; tensors that are sharded here may be given whole."""
        named = [without_wrappers(version, set(self._own())) for version in versions]
        while len(self._kept) < len(versions):
            self.extend()
        while len(self._kept) > len(versions):
            self._kept.popleft()
        for kept, version in zip(self._kept, named, strict=True):
            self._copy({name: _sharded_like(own, version[name]) for name, own in kept.items()}, kept)

    @staticmethod
    def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
        _follow(target, source)
        names = list(target)
        torch._foreach_copy_(
            [_local(target[name]) for name in names], [_local(source[name].detach()) for name in names]
        )

    def _swap(self, kept: dict[str, Tensor]) -> None:
        own = self._own()
        torch.clear_autocast_cache()  # it holds the weights as they were, in 16 bits
        _follow(kept, own)
        # A weight that the model uses under two names is swapped once.
        for mine, old in {id(mine): (mine, kept[name]) for name, mine in own.items()}.values():
            _swap_storage(mine, old)

    def _own(self) -> dict[str, Tensor]:
        """The model's tensors, looked up each time: a model may replace a buffer.

        Under the names that they have without wrappers, such as that of torch.compile.
        """
        state = innermost(self._model).state_dict(keep_vars=True)
        return {name: own for name, own in state.items() if isinstance(own, Tensor)}  # not the extra state of a module


def without_wrappers(version: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Stale weights by the names of the model; older states have the prefixes of wrappers, such as `module.`."""
    if names <= version.keys():
        return version
    plain = {_PREFIXES.sub("", name): tensor for name, tensor in version.items()}
    if missing := names - plain.keys():
        raise ValueError(f"the stale weights of the state lack {min(missing)!r}: load a state of the same model")
    return plain


def _follow(kept: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Move kept weights to the device and dtype of the model, which may have changed since."""
    for name, tensor in kept.items():
        if (tensor.device, tensor.dtype) != (own[name].device, own[name].dtype):
            kept[name] = tensor.to(own[name])


@torch.no_grad()
def _swap_storage(own: Tensor, old: Tensor) -> None:
    """Exchange the contents of two tensors; a graph built with `own` is valid again once they are exchanged back."""
    if type(own.data) is Tensor:
        own.data, old.data = old.data, own.data
        return
    # A sharded parameter (DTensor) reads from storage that FSDP holds on to, so its bytes have to move.
    mine, theirs = _local(own), _local(old)
    kept = mine.clone()
    mine.copy_(theirs)
    theirs.copy_(kept)


def _sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """Shard a whole tensor, which every rank has, like `own`; unchanged if `own` is not sharded."""
    if type(own.data) is Tensor or hasattr(tensor, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (DTensor), which shares its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
