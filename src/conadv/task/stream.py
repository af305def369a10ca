"""Training batches without state: a chunk is a function of the seed, the step and its number, not of the rank.

step ──> epoch and position in it ──> order of the epoch ──> indices of a chunk ──> decode, augment ──> batch
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conadv.core.batch import Chunked
from conadv.machine import ordered_map
from conadv.task.data.fit import Fit, fitted
from conadv.task.data.source import DAMAGE_ADVICE, DamagedError, Planes, Source
from conadv.task.draws import Seeds, mix_all, permutation

# Separate streams of random numbers.
_ORDER, _AUGMENT = 11, 12

Chunk = tuple[Tensor, ...]
"""Images and labels, and an augmented view if there is one."""

Augment = Callable[[Source, NDArray[np.int64], Seeds], tuple[Planes, ...]]
"""From a source, indices and one seed per image to the views of these images, each (N, C, H, W)."""


@dataclass(frozen=True)
class Stream:
    """The batches of a training run. Any chunk of any batch can be made at any time, in any process."""

    source: Source
    batch_size: int
    """Images per step, over all lanes."""
    chunk_size: int
    """Images per chunk; chunks are numbered from 0 within a step."""
    seed: int
    augment: Augment
    workers: int = 0
    """Threads that prepare chunks in advance; 0: prepare each chunk when it is requested."""
    pin_memory: bool = False
    """Return page-locked tensors, which are copied to a CUDA device asynchronously."""
    copies: int = 1
    """How often each image is in a batch, augmented differently; copies of an image are in consecutive chunks."""

    def __post_init__(self) -> None:
        assert 1 <= self.batch_size <= len(self.source)
        assert self.batch_size % self.chunk_size == 0
        assert self.chunks_per_step % self.copies == 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self.source) * self.copies // self.batch_size

    @property
    def chunks_per_step(self) -> int:
        return self.batch_size // self.chunk_size

    def indices(self, step: int, chunk: int) -> NDArray[np.int64]:
        """The indices of the images of a chunk."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * (self.batch_size // self.copies) + chunk // self.copies * self.chunk_size
        return _order(len(self.source), self.seed, epoch)[first : first + self.chunk_size]

    def chunk(self, step: int, chunk: int) -> Chunk:
        """A chunk: (images, labels), or (images, labels, augmented)."""
        indices = self.indices(step, chunk)
        seeds = mix_all(self.seed, _AUGMENT, step // self.steps_per_epoch, indices)
        if copy := chunk % self.copies:
            seeds = mix_all(seeds, copy)
        with _advice():
            images, *further = (as_tensor(view) for view in self.augment(self.source, indices, seeds))
        return _pinned((images, torch.from_numpy(self.source.labels[indices]), *further), self.pin_memory)

    def batches(self, start: int, stop: int | None, chunks: Sequence[int] | None = None) -> Generator[Chunked]:
        """Yield the batches of steps start to stop - 1 (endless without a stop), with these chunks (None: all) of each.

        Each worker has at most two chunks in memory, one done and one in progress, however large the batch is.
        """
        everything = range(self.chunks_per_step)
        chunks = everything if chunks is None else chunks
        assert start >= 0
        assert all(chunk in everything for chunk in chunks), (chunks, everything)
        steps = range(start, sys.maxsize if stop is None else stop)
        wanted = ((step, chunk) for step in steps for chunk in chunks)
        with closing(ordered_map(lambda which: self.chunk(*which), wanted, self.workers)) as made:
            for _ in steps:
                batch = Chunked(len(chunks), islice(made, len(chunks)))
                yield batch
                deque(batch.chunks, maxlen=0)  # drop chunks that the caller did not take


def evaluation_batches(
    source: Source,
    batch_size: int,
    fit: Fit,
    workers: int = 0,
    indices: Sequence[int] | None = None,
    pin_memory: bool = False,
) -> Iterator[Chunk]:
    """Yield every image (or those of `indices`) once, in order, without augmentation; the last batch may be smaller."""
    wanted = np.asarray(range(len(source)) if indices is None else indices, dtype=np.int64)

    def batch(first: int) -> Chunk:
        part = wanted[first : first + batch_size]
        with _advice():
            images = as_tensor(fitted(source, part, fit))
        return _pinned((images, torch.from_numpy(source.labels[part])), pin_memory)

    return ordered_map(batch, range(0, len(wanted), batch_size), workers)


def as_tensor(images: Planes) -> Tensor:
    """The same bytes as a contiguous tensor."""
    return torch.from_numpy(np.ascontiguousarray(images))


def _pinned(tensors: Chunk, pin: bool) -> Chunk:
    return tuple(tensor.pin_memory() for tensor in tensors) if pin else tensors


@contextmanager
def _advice() -> Iterator[None]:
    """Add what to do to errors about damaged images."""
    try:
        yield
    except DamagedError as error:
        raise ValueError(f"{error}; {DAMAGE_ADVICE}") from error


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(length, seed, _ORDER, epoch)
