"""What an attack is, and how it runs without leaving a trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .branches import Branch, split_layers
from .seeds import untouched_randomness
from .splitbn import Statistics, routed

# (outputs, labels) -> the mean over the images, as PyTorch's losses are by default.
Loss = Callable[[Any, Any], Tensor]
# How a model is called with images: plainly, or with further inputs in addition.
Call = Callable[[nn.Module, Tensor], Any]


def call_plainly(model: nn.Module, images: Tensor) -> Any:
    """Call a model whose only input are the images."""
    return model(images)


@runtime_checkable
class Attack(Protocol):
    """What generates the twins of images. `conadv.PGD` is one; catalog.py lists those that recipes can name."""

    def __call__(
        self, model: nn.Module, loss: Loss, images: Tensor, labels: Any, seed: int = 0, call: Call = call_plainly
    ) -> Tensor:
        """Generate the twins of images, and leave no trace in the model.

        Args:
            model: the network to attack.
            loss: from outputs and labels to the mean loss over the images.
            images: (N, ...), where the model is.
            labels: of the images.
            seed: decides everything random.
            call: how the model is called with images.
        """

    def along(self, images: Tensor, gradient: Tensor, seed: int = 0) -> Tensor:
        """Take one step from the images along a gradient of the loss, summed over the images, that is known already."""

    def check_reusable(self) -> None:
        """Raise a ValueError if one step along a known gradient (`along`) is not all that this attack does."""

    def check_range(self, images: Tensor) -> None:
        """Raise a ValueError if the images are not in the range that the attack was made for."""

    def exact_as_bytes(self, *, from_images: bool) -> bool:
        """Whether twins of images that came as bytes are whole 255ths again, so that a byte per pixel loses nothing.

        Args:
            from_images: the attack starts at the image itself, as `along` does.
        """


def input_gradient(
    model: nn.Module,
    total: Callable[[Tensor], Tensor],
    images: Tensor,
    context: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """The gradient of `total(images)` by the images, computed within a context that is entered for each attempt.

    With inputs named, autograd computes no gradients of weights. Reentrant activation checkpointing does not allow
    that; there, requires_grad of the weights is switched off.
    """
    try:
        leaf = images.detach().requires_grad_()
        with torch.enable_grad(), context():
            # A model may work in place, which a leaf of the graph does not allow.
            (gradient,) = torch.autograd.grad(total(leaf.clone()), leaf)
            return gradient
    except RuntimeError as error:
        if "When use_reentrant=True" not in str(error):
            raise
    leaf = images.detach().requires_grad_()
    with torch.enable_grad(), context(), _without_weight_gradients(model):
        total(leaf.clone()).backward()
    assert leaf.grad is not None
    return leaf.grad


@contextmanager
def _without_weight_gradients(model: nn.Module) -> Iterator[None]:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def without_trace(model: nn.Module, branch: Branch, statistics: Statistics | None, seed: int | None) -> Iterator[None]:
    """Within, images go through `branch` with `statistics`; after it buffers, flags and generators are as before."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    split = {owner for layer in split_layers(model) for owner in layer.owners().values()}
    plain = [module for module in model.modules() if module not in split]
    with (
        _copied_buffers(plain),
        _statistics_of(plain, statistics, model.training),
        untouched_randomness(device, seed),
        routed(model, branch, statistics=statistics, tracking="off"),
    ):
        yield


@contextmanager
def _copied_buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Within, modules work on copies: the buffers themselves may belong to a graph that is still to be walked."""
    before = [(module, dict(module._buffers)) for module in modules]
    copies: dict[Tensor, Tensor] = {}  # a buffer of two modules stays one buffer
    try:
        for module, buffers in before:
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


@contextmanager
def _statistics_of(modules: list[nn.Module], statistics: Statistics | None, training: bool) -> Iterator[None]:
    """Within, plain BatchNorm layers take `statistics`, unless they are frozen; None: as their own flag says."""
    norms = [module for module in modules if isinstance(module, _BatchNorm)]
    flags = [norm.training for norm in norms]
    try:
        for norm, flag in zip(norms, flags, strict=True):
            frozen = training and not flag
            norm.training = flag if statistics is None else statistics == "batch" and not frozen
        yield
    finally:
        for norm, flag in zip(norms, flags, strict=True):
            norm.training = flag
