"""A small vision transformer. It has no BatchNorm, so clean images and twins share all of its layers.

    images ──► normalize ──► patches ──► + position ──► blocks ──► norm ──► mean over patches ──► head ──► logits

As in Beyer et al. (2022): position embeddings are fixed sines and cosines, so images may have any size that is a
multiple of the patch, and there is no class token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HEAD_WIDTH = 64  # channels of one attention head
_LONGEST_WAVE = 10_000


@dataclass(frozen=True)
class Size:
    """The size of a vision transformer."""

    patch: int
    depth: int
    width: int = 192


SIZES = {"vit4": Size(patch=4, depth=6), "vit16": Size(patch=16, depth=12)}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a shortcut, on tokens of shape (N, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, N, heads, tokens, -1)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """A vision transformer from images (N, C, H, W), H and W multiples of the patch, to logits (N, classes).

    Args:
        size: patch, depth and width.
        classes: number of classes.
        in_channels: channels of the images.
        normalize: first layer, which gets images in [0, 1].
    """

    def __init__(self, size: Size, classes: int, in_channels: int, normalize: nn.Module) -> None:
        super().__init__()
        heads = max(1, size.width // _HEAD_WIDTH)
        if size.width % 4 or size.width % heads:
            raise ValueError(f"width {size.width}: a vision transformer needs a multiple of 4, or of 64 from 128 on")
        self.normalize = normalize
        self.patches = nn.Conv2d(in_channels, size.width, size.patch, stride=size.patch)
        self.blocks = nn.Sequential(*(Block(size.width, heads) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, classes)
        self.apply(_initialize)
        nn.init.zeros_(self.head.weight)  # equal logits for all classes

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        patch = self.patches.stride[0]
        if height % patch or width % patch:
            raise ValueError(f"images of {height} × {width} pixels cannot be cut into patches of {patch}: resize them")
        x = self.patches(self.normalize(images))
        x = x.flatten(2).transpose(1, 2) + places(x)
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]


def places(grid: Tensor) -> Tensor:
    """Position embeddings: sines and cosines of the row and the column of each patch.

    Args:
        grid: the patches, (N, width, rows, columns).

    Returns:
        (rows · columns, width).
    """
    _, width, rows, columns = grid.shape
    frequencies = _LONGEST_WAVE ** -torch.linspace(0, 1, width // 4, device=grid.device, dtype=grid.dtype)
    row, column = (
        torch.outer(torch.arange(count, device=grid.device, dtype=grid.dtype), frequencies) for count in (rows, columns)
    )
    row, column = row.repeat_interleave(columns, 0), column.repeat(rows, 1)
    return torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], 1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
