"""Training batches without state: chunk c of step s depends only on the seed, not on the rank or on what ran before.

step ──> epoch, place in it ──> order of the epoch ──> indices of a chunk ──> decode, augment ──> batch
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conadv.core.batch import Chunk, Chunked
from conadv.core.memory import is_out_of_memory
from conadv.task.data.ahead import ordered_map
from conadv.task.data.draws import Seeds, mix_all, permutation
from conadv.task.data.fit import Fit
from conadv.task.data.kept import fitted
from conadv.task.data.source import DAMAGE_ADVICE, DamagedError, Labels, Planes, Source

# What a random number is for, so that two uses never share one.
_ORDER, _AUGMENT, _MIX = 11, 12, 13


class Augment(Protocol):
    """What happens to images before they are learnt from; `conadv.task.augment` has the usual ones."""

    def __call__(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> tuple[Planes, ...]:
        """The views of these images, each (N, C, H, W), as a function of a seed an image."""


class Mix(Protocol):
    """What happens to a chunk as a whole; `conadv.task.augment.mixup` has the usual ones."""

    def __call__(
        self, views: tuple[Planes, ...], labels: Labels, classes: int, seed: Seeds
    ) -> tuple[tuple[Planes, ...], NDArray[np.float32]]:
        """The views mixed alike, and the labels as shares of the classes, (N, classes)."""


@dataclass(frozen=True)
class Stream:
    """The batches of a training run; any part of any of them can be made at any time, in any process."""

    source: Source
    batch_size: int
    """Images a step, over all lanes."""
    chunk_size: int
    """Images a chunk; chunks are numbered from 0 within a step."""
    seed: int
    augment: Augment
    workers: int = 0
    """Threads that prepare chunks ahead of their use; 0 prepares them when they are asked for."""
    pin_memory: bool = False
    """Page-locked tensors, which a CUDA device copies without waiting."""
    mix: Mix | None = None
    """Labels are shares of the classes with it, (N, classes), and else class numbers."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= len(self.source):
            raise ValueError(
                f"batch_size {self.batch_size} does not fit {len(self.source)} training images: "
                "choose a smaller batch or more data"
            )
        if self.chunk_size < 1 or self.batch_size % self.chunk_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a whole number of chunks of {self.chunk_size} images: "
                "choose a chunk_size that divides it"
            )
        if self.workers < 0:
            raise ValueError(f"workers {self.workers}: choose 0 or more")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.source) // self.batch_size

    @property
    def remainder(self) -> int:
        """Images left out of an epoch, others in every epoch."""
        return len(self.source) % self.batch_size

    @property
    def chunks_per_step(self) -> int:
        return self.batch_size // self.chunk_size

    def indices(self, step: int, chunk: int) -> NDArray[np.int64]:
        """Which images form this chunk of this step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size + chunk * self.chunk_size
        return _order(len(self.source), self.seed, epoch)[first : first + self.chunk_size]

    def chunk(self, step: int, chunk: int) -> Chunk:
        """This chunk of this step: (images, labels), or (images, labels, augmented)."""
        indices = self.indices(step, chunk)
        seeds = mix_all(self.seed, _AUGMENT, step // self.steps_per_epoch, indices)
        with _advice():
            views, labels = self.augment(self.source, indices, seeds), self.source.labels[indices]
            if self.mix is not None:
                seed = mix_all(self.seed, _MIX, step, chunk)
                views, labels = self.mix(views, labels, len(self.source.classes), seed)  # type: ignore[assignment]
        images, *further = (as_tensor(view) for view in views)
        made = (images, torch.from_numpy(labels), *further)
        return tuple(part.pin_memory() for part in made) if self.pin_memory else made

    def batches(self, start: int, stop: int | None, chunks: Sequence[int] | None = None) -> Generator[Chunked]:
        """Steps start..stop-1 (without a stop, endless), of which these chunks (all by default), one at a time.

        Each worker has at most two chunks in memory, one done and one in progress, however large a batch is.
        """
        everything = range(self.chunks_per_step)
        chunks = everything if chunks is None else chunks
        assert start >= 0
        assert all(chunk in everything for chunk in chunks), (chunks, everything)
        steps = range(start, sys.maxsize if stop is None else stop)
        wanted = ((step, chunk) for step in steps for chunk in chunks)
        with closing(ordered_map(lambda which: self.chunk(*which), wanted, self.workers, 2 * self.workers)) as made:
            for _ in steps:
                batch = Chunked(len(chunks), islice(made, len(chunks)))
                yield batch
                deque(batch.chunks, maxlen=0)  # chunks that were not asked for


def evaluation_batches(
    source: Source,
    batch_size: int,
    fit: Fit,
    workers: int = 0,
    indices: Sequence[int] | None = None,
    pin_memory: bool = False,
) -> Iterator[Chunk]:
    """Every image (or those of `indices`) once, in order, not augmented; the last batch may be smaller."""
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} images: choose 1 or more")
    wanted = np.asarray(range(len(source)) if indices is None else indices, dtype=np.int64)

    def made(first: int) -> Chunk:
        part = wanted[first : first + batch_size]
        with _advice():
            made = as_tensor(fitted(source, part, fit)), torch.from_numpy(source.labels[part])
        return tuple(tensor.pin_memory() for tensor in made) if pin_memory else made

    return ordered_map(made, range(0, len(wanted), batch_size), workers, 2 * workers)


def as_tensor(images: Planes) -> Tensor:
    """The same bytes as a contiguous tensor."""
    return torch.from_numpy(np.ascontiguousarray(images))


@contextmanager
def _advice() -> Iterator[None]:
    """What can be done about a damaged image, or about memory that does not suffice."""
    try:
        yield
    except DamagedError as error:
        raise ValueError(f"{error}; {DAMAGE_ADVICE}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            "not enough memory to prepare images: lower chunk_size, data.memory, data.image_size or data.workers"
        ) from error


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(length, seed, _ORDER, epoch)
