"""What people put around a model, and the model inside: torch.compile, data parallelism, averaged weights, Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

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
    """The model inside all wrappers, nested in any order; a model without wrappers as it is."""
    return list(_layers_of(model))[-1]


def unwrap(model: nn.Module) -> nn.Module:
    """The model without the wrappers that exchange or average, but compiled if it was.

    Gradients are exchanged only through the wrapper, so that an attack on what this returns concerns one process.
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
    """The autocast that a Fabric wrapper runs its model in, for those who call the model inside of it."""
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


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded over ranks (a DTensor, as FSDP2 has them), gathered; every rank must ask for it."""
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
