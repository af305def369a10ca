"""Detects, in the first steps, a loop that also backpropagates its own loss of the batch that a method learns from.

model(images), not by a method ──► backward pass that adds to `.grad` ──► the same images, and the gradient of the
same loss by the outputs, as in the call before or after? If so, the gradients are added twice.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from conadv.core.attack import Loss
from conadv.core.batch import Batch, to_device, to_pixels

from .peers import is_sharded


def can_be_watched(model: nn.Module) -> bool:
    """Whether a model takes hooks, and has gradients that can be read without the other ranks."""
    return not isinstance(model, torch.jit.ScriptModule) and not is_sharded(model)


class _Pass(NamedTuple):
    """A forward pass of the loop itself, and its backward pass."""

    images: Tensor
    outputs: Tensor
    gradient: Tensor
    """Of the loop's loss, by the outputs."""
    is_added: bool
    """Whether the method had left gradients that were not cleared."""


class OwnLoss:
    """Watch the forward passes of a model until this object is deleted.

    Args:
        model: the network, as the loop calls it.
        loss: from outputs and labels to the mean loss.
    """

    working: ClassVar = False
    """Whether a method is taking a step, so that forward passes are its own."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = model, loss
        self._seen: _Pass | None = None
        self._last: Any = None  # the batch of the last call
        handle = model.register_forward_hook(_Hook(self), with_kwargs=True)
        weakref.finalize(self, handle.remove)

    def is_found(self, batch: Any) -> bool:
        """Whether, before this call, the loop backpropagated its own loss of this batch or of the last one."""
        seen, last = self._seen, self._last
        self._seen, self._last = None, batch
        if seen is None:
            return False
        return (self._is_of(seen, batch) and self._has_gradients()) or (seen.is_added and self._is_of(seen, last))

    def watch(self, images: Tensor, outputs: Tensor) -> None:
        """Remember a pass of the loop, once it is backpropagated."""
        outputs.register_hook(partial(self._begin_backward, images.detach(), outputs.detach()))

    def _begin_backward(self, images: Tensor, outputs: Tensor, gradient: Tensor) -> None:
        seen = _Pass(images, outputs, gradient.detach(), self._last is not None and self._has_gradients())
        end = partial(self._end_backward, seen, self._versions())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, seen: _Pass, versions: list[tuple[int, int]]) -> None:
        if self._versions() != versions:  # not torch.autograd.grad, which adds to no `.grad`
            self._seen = seen

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self._model.parameters() if weight.grad is not None]

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(gradient), gradient._version) for gradient in self._gradients()]

    def _has_gradients(self) -> bool:
        return any(bool(gradient.any()) for gradient in self._gradients())

    def _is_of(self, seen: _Pass, batch: Any) -> bool:
        """Whether a pass had these images and, up to a factor, the loss of the method."""
        if not isinstance(batch, Batch):
            return False
        images = to_pixels(batch.images, seen.images.device, seen.images.dtype)
        if images.shape != seen.images.shape or not torch.allclose(images.to(seen.images), seen.images):
            return False
        outputs = seen.outputs.clone().requires_grad_()
        (own,) = torch.autograd.grad(self._loss(outputs, to_device(batch.labels, outputs.device)), outputs)
        return bool(torch.cosine_similarity(own.double().flatten(), seen.gradient.double().flatten(), 0) > 0.999)


class _Hook:
    """The forward hook of the model."""

    def __init__(self, watch: OwnLoss) -> None:
        self._watch = weakref.ref(watch)

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        watch = self._watch()
        images = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if watch is None or images is None or OwnLoss.working or not model.training:
            return
        if isinstance(outputs, Tensor) and outputs.requires_grad and torch.is_grad_enabled():
            watch.watch(images, outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a hook that does nothing, and that loads without this library."""
        return getattr, (nullcontext(), "__exit__")
