"""Wrappers around a model, and the model inside: torch.compile, data parallelism, averaged weights, Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
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


def is_float16(device: torch.device, autocast: torch.dtype | None) -> bool:
    """Whether forward passes run in float16: by `autocast`, or within the caller's torch.autocast."""
    kind = device.type
    autocasts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    around = torch.get_autocast_dtype(kind) if autocasts else None
    return torch.float16 in (autocast, around)


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel wrapper among those of a model."""
    return next((layer for layer in _layers_of(model) if isinstance(layer, DistributedDataParallel)), None)


def is_exchanged(model: nn.Module) -> bool:
    """Whether a wrapper inside the model already knows its parameters, and would not exchange new ones."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return not names.isdisjoint({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that is sharded over ranks (a DTensor, as with FSDP2); every rank must call it."""
    is_sharded = any(base.__name__ == "DTensor" for base in type(tensor).__mro__)
    return tensor.full_tensor() if is_sharded else tensor  # type: ignore[attr-defined]


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
