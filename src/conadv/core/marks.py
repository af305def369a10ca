"""Marks in the graph of a loss: they tell a backward pass outside of a route which branch its images went through."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .branches import Branch, SplitLayer, split_layers


class _Mark(torch.autograd.Function):
    """The loss itself, whose backward pass says through which branch its images went.

    Autograd walks the graph of a later forward pass before that of an earlier one, so the mark holds for all layers
    that activation checkpointing runs again until the next mark.
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
    """The loss of images that went through `branch`, for a backward pass outside of a route."""
    layers = split_layers(model)
    return _Mark.apply(loss, layers, branch) if layers else loss
