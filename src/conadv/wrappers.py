"""What other libraries put around a model, and what a method must do for each of them. No-ops on a plain model.

torch.compile, AveragedModel, Fabric   the model inside, which attacks and state dicts are about
DistributedDataParallel                exchanges gradients once per step, and waits for every parameter
FSDP2                                  each rank holds a part of each weight (a DTensor)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Wrapper classes by their full names, since importing the compiler takes seconds and Fabric may be missing.
_INNER = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}


def innermost(model: nn.Module) -> nn.Module:
    """The model inside all wrappers, nested in any order."""
    return list(_layers_of(model))[-1]


def unwrap(model: nn.Module) -> nn.Module:
    """The model without wrappers that exchange gradients or average weights, still compiled if it was.

    Gradients are exchanged only through the wrapper, so an attack on this model involves one process only.
    """
    inner = innermost(model)
    compiled = [layer for layer in _layers_of(model) if _wrapper(layer).endswith("OptimizedModule")]
    if not compiled:
        return inner
    if compiled[-1]._modules["_orig_mod"] is inner:
        return compiled[-1]
    # torch.compile around another wrapper: compile what is inside of it in the same way.
    return type(compiled[-1])(inner, compiled[-1].dynamo_ctx)


def precision(model: nn.Module) -> AbstractContextManager[None]:
    """The autocast context of a Fabric wrapper, for calls of the model inside it."""
    fabric = next((layer for layer in _layers_of(model) if _wrapper(layer).endswith("_FabricModule")), None)
    if fabric is None:
        return nullcontext()
    return fabric._strategy.precision.forward_context()  # type: ignore[union-attr, operator, no-any-return]


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel wrapper among those of a model."""
    return next((layer for layer in _layers_of(model) if isinstance(layer, DistributedDataParallel)), None)


def is_exchanged(model: nn.Module) -> bool:
    """Whether a wrapper inside the model already knows its parameters, and would not exchange new ones."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return not names.isdisjoint({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def syncing(parallel: DistributedDataParallel | None, last: bool) -> AbstractContextManager[None]:
    """A context for one of several backward passes of a step: gradients are all-reduced in the last one."""
    return nullcontext() if last or parallel is None else parallel.no_sync()


def broadcast_early(parallel: DistributedDataParallel | None) -> None:
    """Broadcast the buffers of rank 0 now if the next forward pass would, so that only the model changes them there."""
    if parallel is not None and parallel._check_sync_bufs_pre_fwd():
        parallel._sync_buffers()


def touched(loss: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """Let the backward pass of a loss visit these weights too, without a gradient: DDP waits for every parameter."""
    result: Tensor = _Touch.apply(loss, *weights)
    return result


def rank_and_size() -> tuple[int, int]:
    """The rank of this process among all, and their number; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def group_size(group: Any) -> tuple[Any, int]:
    """A process group (None: that of all ranks) and its number of ranks; 1 without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None, 1
    group = group or dist.group.WORLD
    return group, dist.get_world_size(group)


def gathered(tensor: Tensor, size: int) -> Tensor:
    """The tensors of all ranks, stacked by rank; every rank must call it."""
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.contiguous())
    return torch.stack(parts)


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank has only parts of the weights, as with FSDP2."""
    return any(type(parameter.data) is not Tensor for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is sharded over ranks (a DTensor, as with FSDP2); every rank must call it."""
    is_sharded = any(base.__name__ == "DTensor" for base in type(tensor).__mro__)
    return tensor.full_tensor() if is_sharded else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (DTensor), which shares its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """Shard a whole tensor, which every rank has, like `own`; unchanged if `own` is not sharded."""
    if type(own.data) is Tensor or hasattr(tensor, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


class _Touch(torch.autograd.Function):
    """Return the loss; its backward pass also visits the weights, with no gradient for them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = len(weights)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, *[None] * ctx.weights)


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model and, from the outside in, what its wrappers hold."""
    yield model
    while name := _wrapper(model):
        inner = model._modules[_INNER[name]]
        assert inner is not None
        model = inner
        yield model


def _wrapper(model: nn.Module) -> str:
    """The full name of a wrapper class; empty for any other model."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__)
    return next((name for name in names if name in _INNER), "")
