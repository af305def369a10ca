"""DistributedDataParallel around a model: when it all-reduces gradients, and which weights it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .batchnorm.branches import split_layers
from .roles import ALONE, Place


def syncing(parallel: DistributedDataParallel | None, last: bool) -> AbstractContextManager[None]:
    """A context for one of several backward passes of a step: gradients are all-reduced in the last one."""
    return nullcontext() if last or parallel is None else parallel.no_sync()


def broadcast_early(parallel: DistributedDataParallel | None) -> None:
    """Broadcast the buffers of rank 0 now if the next forward pass would, so that only the model changes them there."""
    if parallel is not None and parallel._check_sync_bufs_pre_fwd():
        parallel._sync_buffers()


def touch_other_branches(loss: Tensor, model: nn.Module, branches: Sequence[str]) -> Tensor:
    """Let the backward pass of a loss visit the weights of all other branches too: DDP waits for every parameter."""
    layers = split_layers(model)
    owners = [layer.owner(name) for layer in layers for name in layer.branches if name not in branches]
    weights = [p for owner in owners for p in owner.parameters(recurse=False) if p.requires_grad]
    touched: Tensor = _Touch.apply(loss, *weights)
    return touched


def place_of_rank() -> Place:
    """Give the ranks of a data-parallel loop, which often share a seed, disjoint chunk numbers."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Place(first_chunk=dist.get_rank() << 32)


class _Touch(torch.autograd.Function):
    """Return the loss; its backward pass also visits the weights, with no gradient for them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = len(weights)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, *[None] * ctx.weights)
