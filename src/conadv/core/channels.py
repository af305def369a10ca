"""Numbers per channel, such as the mean and the standard deviation that images were normalized with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def channel_numbers(name: str, values: Any) -> tuple[float, ...] | None:
    """Convert a sequence, an array or a tensor, also of shape (C, 1, 1), to a tuple of numbers."""
    if values is None:
        return None
    try:
        numbers = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(0.0)
    if numbers.dim() == 0:
        raise ValueError(f"{name} {values!r}: one number per channel, such as (0.485, 0.456, 0.406)")
    return tuple(numbers.flatten().tolist())


def per_channel(values: Sequence[float] | None, default: float, images: Tensor) -> Any:
    """Numbers per channel as a tensor that broadcasts with images (N, C, ...); `default` if there are none."""
    if values is None:
        return default
    if len(values) != images.shape[1]:
        raise ValueError(f"mean and std have {len(values)} channels, the images {images.shape[1]}")
    shape = (-1, *[1] * (images.dim() - 2))
    return torch.tensor(values, dtype=images.dtype).to(images.device, non_blocking=True).view(shape)
