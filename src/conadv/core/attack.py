"""What an attack is, and how it runs without leaving a trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .branches import owners_of
from .seeds import untouched_randomness
from .splitbn import Statistics, route

# (outputs, labels) -> the mean over the images, as PyTorch's losses are by default.
Loss = Callable[[Any, Any], Tensor]


@runtime_checkable
class Attack(Protocol):
    """An attack generates the twins of images. `conadv.PGD` is one, that of recipes; yours derives from this class."""

    def __call__(self, model: nn.Module, loss: Loss, images: Tensor, labels: Any, seed: int = 0) -> Tensor:
        """Generate the twins of images.

        Args:
            model: the network to attack, routed through the branch of the twins; a method restores its buffers and all
                random state afterwards. Take gradients with `torch.autograd.grad`, which leaves `.grad` alone.
            loss: from outputs and labels to the mean loss over the images.
            images: (N, ...), on the device of the model.
            labels: of the images.
            seed: decides everything random.
        """

    def along(self, images: Tensor, gradient: Tensor, seed: int = 0) -> Tensor:
        """Take one step from the images along a given gradient of the loss, summed over the images: for `Recycled`."""
        raise NotImplementedError

    def check_reusable(self) -> None:
        """Raise a ValueError unless this attack is one step along a gradient, as `along` takes it."""
        raise ValueError(f"recycled takes one step along a gradient that it has, and {self!r} cannot: use conadv.PGD")

    def check_range(self, images: Tensor) -> None:
        """Raise a ValueError if the images are not in the range that the attack was made for."""

    def exact_as_bytes(self, *, from_images: bool) -> bool:
        """Whether twins of 8-bit images are 8-bit images too, so that sending them as bytes loses nothing.

        Args:
            from_images: the attack starts at the image itself, as `along` does.
        """
        return False


def input_gradient(total: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The gradient of `total(images)` with respect to the images; autograd then computes none of the weights."""
    leaf = images.detach().requires_grad_()
    with torch.enable_grad():
        # A model may work in place, which a leaf of the graph does not allow.
        (gradient,) = torch.autograd.grad(total(leaf.clone()), leaf)
    return gradient


@contextmanager
def without_trace(model: nn.Module, branch: str, statistics: Statistics | None, seed: int | None) -> Iterator[None]:
    """Route images through `branch` with `statistics`; restore buffers, flags and generators afterwards."""
    plain = unsplit_modules(model)
    flags = []
    try:
        for norm in plain:
            if isinstance(norm, _BatchNorm) and statistics is not None:
                flags.append((norm, norm.training))
                frozen = model.training and not norm.training
                norm.training = statistics == "batch" and not frozen
        with (
            copied_buffers(plain),
            untouched_randomness(next(model.parameters()).device, seed),
            route(model, branch, statistics=statistics, tracking="off"),
        ):
            yield
    finally:
        for norm, flag in flags:
            norm.training = flag


def unsplit_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that hold no BatchNorm branch."""
    owners = owners_of(model)
    return [module for module in model.modules() if module not in owners]


@contextmanager
def copied_buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Let modules work on copies of their buffers, which a later backward pass may still need."""
    before: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    copies: dict[Tensor, Tensor] = {}  # a buffer of two modules stays one buffer
    try:
        for module in modules:
            before.append((module, dict(module._buffers)))
            for name, buffer in before[-1][1].items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)
