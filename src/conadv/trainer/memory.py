"""What a run needs at least, compared with free memory before any of it is asked for.

Linux promises more memory than there is and kills the process that uses it, without a word: this says why first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from conadv.task.data.bounds import check_memory


def check_model(build: Callable[[], nn.Module], shape: tuple[int, ...], images: int, itemsize: int) -> None:
    """Refuse a network whose weights, and activations of a few images, are more than free memory.

    Args:
        build: Makes the network; it is built without memory, on PyTorch's meta device.
        shape: Channels, height and width of an image.
        images: How many go through the network at once.
        itemsize: Bytes of a number.
    """
    numbers = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal numbers
        numbers += output.numel()

    with torch.device("meta"), torch.no_grad():
        model = build()
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):  # whose outputs BatchNorm keeps for its backward pass
                layer.register_forward_hook(count)
        with suppress(ValueError, RuntimeError):  # of images that it does not take; `check_output` says so
            model(torch.empty(images, *shape))
    numbers += sum(weight.numel() for weight in model.parameters())
    what = f"the network with {images} images of {' × '.join(map(str, shape))}"
    check_memory(numbers * itemsize, what, "lower --width, --chunk-size, --data.image-size or --data.classes")


def check_copies(model: nn.Module, copies: int) -> None:
    """Refuse copies of the weights that are more than free memory: gradients, momentum, stale weights, averages."""
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    check_memory(size * copies, f"{copies} copies of the weights", "lower --delay or --width")
