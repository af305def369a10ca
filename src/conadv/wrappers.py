"""What other libraries put around a model or a step, and what a method must do for each. No-ops on a plain model.

torch.compile, AveragedModel, Fabric   the model inside, which attacks and state dicts are about
DistributedDataParallel                exchanges gradients once per step, and waits for every parameter
FSDP2                                  each rank holds a part of each weight (a DTensor)
torch.profiler                         the parts of a step are spans of its trace, which `conadv timeline` draws
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

# The parts of a step, in the order of the timeline.
SPANS = ("load", "attack", "clean pass", "adversarial pass", "hand-off", "gradient sum", "update")
STEP = "step"
# The prefix of spans in a trace, which tells them from other events.
PREFIX = "conadv: "

# Wrapper classes by their full names, since importing the compiler takes seconds and Fabric may be missing.
_INNER = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}


@cache
def _held(kind: type) -> str:
    """The name under which a wrapper of this class holds the model; empty for any other class."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_INNER[name] for name in names if name in _INNER), "")


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each wrapper from the outside in, with the name under which it holds the next; then the model, without one."""
    while name := _held(type(model)):  # type: ignore[arg-type]  # a class is hashable
        yield model, name
        model = model._modules[name]  # type: ignore[assignment]
    yield model, ""


def innermost(model: nn.Module) -> nn.Module:
    """The model inside all wrappers, nested in any order."""
    *_, (inner, _) = _layers(model)
    return inner


def unwrap(model: nn.Module) -> nn.Module:
    """The model without wrappers that exchange gradients or average weights, still compiled if it was.

    Gradients are exchanged only through the wrapper, so an attack on this model involves one process only.
    """
    *wrappers, (inner, _) = _layers(model)
    compilers = [one for one, name in wrappers if name == "_orig_mod"]
    if not compilers:
        return inner
    compiled = compilers[-1]
    if compiled._modules["_orig_mod"] is inner:
        return compiled
    # torch.compile around another wrapper: compile what is inside of it in the same way.
    return type(compiled)(inner, compiled.dynamo_ctx)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The weights that are learnt."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def precision(model: nn.Module) -> AbstractContextManager[None]:
    """The autocast context of a Fabric wrapper, for calls of the model inside it."""
    for one, name in _layers(model):
        if name == "_forward_module":
            return one._strategy.precision.forward_context()  # type: ignore[union-attr, operator, no-any-return]
    return nullcontext()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision of the surrounding torch.autocast; None if there is none."""
    autocasts = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if autocasts else None


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel wrapper among those of a model."""
    return next((one for one, _ in _layers(model) if isinstance(one, DistributedDataParallel)), None)


def refuse_options(parallel: DistributedDataParallel | None, has_branches: bool) -> None:
    """Refuse a DistributedDataParallel that looks for weights which a pass does not reach, or expects equal passes."""
    if parallel is not None and parallel.find_unused_parameters and has_branches:
        raise ValueError(
            "each pass leaves one branch unused, which find_unused_parameters=True cannot handle: set it to False "
            "(Transformers: ddp_find_unused_parameters=False)"
        )
    if parallel is not None and parallel.static_graph:
        raise ValueError(
            "DistributedDataParallel(static_graph=True) allows one backward pass per step, and a method takes "
            "several: leave static_graph out"
        )


def is_exchanged(model: nn.Module) -> bool:
    """Whether a wrapper inside the model already knows its parameters, and would not exchange new ones."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return not names.isdisjoint({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def broadcast_early(parallel: DistributedDataParallel | None) -> None:
    """Broadcast the buffers of rank 0 now if the next forward pass would, so that only the model changes them there."""
    if parallel is not None and parallel._check_sync_bufs_pre_fwd():
        parallel._sync_buffers()


def touched(loss: Tensor, weights: Iterable[Tensor], zeros: bool = False) -> Tensor:
    """Let the backward pass of a loss visit these weights too, with no gradient or `zeros`: DDP waits for all."""
    result: Tensor = _Touch.apply(loss, zeros, *weights)
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


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors. A graph that was built with one is valid again once they are back."""
    if type(one.data) is Tensor:
        one.data, other.data = other.data, one.data
    else:  # a shard (DTensor) reads from storage that FSDP holds on to, so its bytes have to move
        here, there = local(one), local(other)
        before = here.clone()
        here.copy_(there)
        there.copy_(before)


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """Shard a whole tensor, which every rank has, like `own`; unchanged if `own` is not sharded."""
    if type(own.data) is Tensor or hasattr(tensor, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def span(name: str) -> AbstractContextManager[object]:
    """A span of time with one of the names of SPANS, or STEP; costs nothing unless a profiler records."""
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else nullcontext()


class Given(nn.Module):
    """A model of images alone: its further inputs are given, and its argument for the images is named."""

    def __init__(self, model: nn.Module, name: str, extra: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self._name, self._extra, self.training = model, name, extra, model.training

    def forward(self, images: Tensor) -> Any:
        return self.model(**{self._name: images}, **self._extra)


class _Touch(torch.autograd.Function):
    """Return the loss; its backward pass also visits the weights, with no gradient for them, or one of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, zeros: bool, *weights: Tensor) -> Tensor:
        ctx.zeros, ctx.weights = zeros, weights
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *(torch.zeros_like(weight) if ctx.zeros else None for weight in ctx.weights)
