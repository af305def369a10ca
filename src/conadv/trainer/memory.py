"""Compare the memory that a run needs at least with free memory, before it is allocated.

Linux allows a process to allocate more memory than there is, and kills it without a message when it uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from conadv.memory import check_memory


def check_model(build: Callable[[], nn.Module], shape: tuple[int, ...], images: int, itemsize: int) -> None:
    """Refuse a network whose weights and activations do not fit into free memory.

    Args:
        build: Creates the network; called on PyTorch's meta device, which allocates nothing.
        shape: Channels, height and width of an image.
        images: How many images go through the network at once.
        itemsize: Bytes per number.
    """
    numbers = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal numbers
        numbers += output.numel()

    with torch.device("meta"), torch.no_grad():
        model = build()
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):  # BatchNorm keeps their outputs for the backward pass
                layer.register_forward_hook(count)
        with suppress(ValueError, RuntimeError):  # images that the network does not accept: `check_output` reports it
            model(torch.empty(images, *shape))
    numbers += sum(weight.numel() for weight in model.parameters())
    what = f"the network with {images} images of {' × '.join(map(str, shape))}"
    check_memory(numbers * itemsize, what, "lower --width, --chunk-size or --data.image-size")


def check_copies(model: nn.Module, copies: int) -> None:
    """Refuse copies of the weights (gradients, momentum, stale weights) that do not fit into free memory."""
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    check_memory(size * copies, f"{copies} copies of the weights", "lower --delay or --width")
