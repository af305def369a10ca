"""Marks in the graph of a loss, which tell a backward pass outside of `route` which branch the images went through."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .branches import SplitLayer, split_layers
from .ways import Branch


class _Mark(torch.autograd.Function):
    """The identity; its backward pass sets the branch that the images went through.

    Autograd runs the backward pass of a later forward pass before that of an earlier one, so the mark holds for all
    layers that activation checkpointing recomputes until the next mark.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, layers: list[SplitLayer], branch: Branch) -> Tensor:
        ctx.layers, ctx.branch = layers, branch
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _set_walked(ctx.layers, ctx.branch)
        # At the end of this backward pass: the next one may be of a loss without a mark.
        torch.autograd.Variable._execution_engine.queue_callback(partial(_set_walked, ctx.layers, None))
        return gradient, None, None


def _set_walked(layers: list[SplitLayer], branch: Branch | None) -> None:
    for layer in layers:
        layer.walked = branch


def marked(loss: Tensor, model: nn.Module, branch: Branch) -> Tensor:
    """Mark the loss of images that went through `branch`, for a backward pass outside of `route`."""
    layers = split_layers(model)
    return _Mark.apply(loss, layers, branch) if layers else loss
