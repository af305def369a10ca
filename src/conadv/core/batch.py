"""What a batch is: images and labels, and how it is cut into the chunks that BatchNorm sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# (images, labels), or (images, labels, augmented) where a method learns from both views of the same images.
# Images are bytes, or floats in [0, 1] (or normalized, when the attack is told mean and std): N, C, H, W.
Chunk = tuple[Tensor, ...]


@dataclass(frozen=True)
class Chunked:
    """A batch that need not be whole in memory: its chunks may come one at a time, and once."""

    count: int
    chunks: Iterable[Chunk]


Batch = Chunk | Chunked


def to_pixels(images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Images as the model takes them: bytes become fractions of the pixel range, floats stay as they are."""
    if images.dtype == torch.uint8:
        return images.to(device, non_blocking=True).to(dtype).div_(255)
    return images.to(device, non_blocking=True)


def count_chunks(batch: Batch, chunk_size: int | None) -> int:
    """How many chunks a batch has; a batch that the chunk does not divide is an error."""
    if isinstance(batch, Chunked):
        return batch.count
    size = len(batch[0])
    if size == 0:
        raise ValueError("an empty batch: drop it from the loader")
    if chunk_size is None:
        return 1
    if size % chunk_size:
        raise ValueError(
            f"a batch of {size} images is not a whole number of chunks of {chunk_size}: "
            "choose a chunk size that divides it, and drop the last, smaller batch of an epoch (drop_last=True)"
        )
    return size // chunk_size


def cut(batch: Batch, chunk_size: int | None) -> Iterator[Chunk]:
    """The chunks of a batch, in order; without a chunk size the batch is its only chunk."""
    if isinstance(batch, Chunked):
        return _whole(batch)
    count = count_chunks(batch, chunk_size)
    return zip(*(part.chunk(count) for part in batch), strict=True)


def _whole(batch: Chunked) -> Iterator[Chunk]:
    """Its chunks, and an error where they end too early, so that nothing is left out without a word."""
    came = 0
    for chunk in batch.chunks:
        came += 1
        yield chunk
    if came < batch.count:
        raise ValueError(f"{came} of {batch.count} chunks came: a batch that comes by chunks can be read once")
