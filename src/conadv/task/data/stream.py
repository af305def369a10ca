"""Training batches without state: chunk c of step s is a function of the seed, whoever asks for it and when.

step ──> epoch, place in it ──> order of the epoch ──> indices of a chunk ──> decode, augment ──> batch
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conadv.core.batch import Batch
from conadv.task.data.ahead import ordered_map
from conadv.task.data.draws import Seeds, mix_all, permutation
from conadv.task.data.fit import Fit, fitted
from conadv.task.data.source import DAMAGE_ADVICE, DamagedError, Planes, Source

# What a random number is for, so that two uses never share one.
_ORDER, _AUGMENT = 11, 12


class Augment(Protocol):
    """What happens to images before they are learnt from; `conadv.task.augment` has the usual ones."""

    def __call__(self, source: Source, indices: NDArray[np.int64], seeds: Seeds) -> tuple[Planes, ...]:
        """The views of these images, each (N, C, H, W), as a function of a seed an image."""


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

    def chunk(self, step: int, chunk: int) -> Batch:
        """This chunk of this step: (images, labels), or (images, labels, augmented)."""
        indices = self.indices(step, chunk)
        seeds = mix_all(self.seed, _AUGMENT, step // self.steps_per_epoch, indices)
        with _advice():
            images, *further = (as_tensor(view) for view in self.augment(self.source, indices, seeds))
        return (images, torch.from_numpy(self.source.labels[indices]), *further)

    def chunks(self, start: int, stop: int | None, chunks: Sequence[int] | None = None) -> Generator[Batch]:
        """These chunks (all by default) of steps start..stop-1, one at a time; without a stop, endless."""
        # Two chunks a worker: one in the making, one made.
        return self._ahead(start, stop, self._checked(start, chunks), 2 * self.workers)

    def batches(self, start: int, stop: int | None, chunks: Sequence[int] | None = None) -> Iterator[Batch]:
        """Like `chunks`, with those of one step joined to one batch."""
        chunks = self._checked(start, chunks)
        # The whole of the next step is made while this one is learnt from.
        with closing(self._ahead(start, stop, chunks, len(chunks) + self.workers)) as pieces:
            while parts := list(islice(pieces, len(chunks))):
                yield tuple(self._joined(views) for views in zip(*parts, strict=True))

    def _ahead(self, start: int, stop: int | None, chunks: Sequence[int], ahead: int) -> Generator[Batch]:
        steps = count(start) if stop is None else range(start, stop)
        wanted = ((step, chunk) for step in steps for chunk in chunks)
        return ordered_map(lambda which: self.chunk(*which), wanted, self.workers, ahead)

    def _joined(self, parts: tuple[Tensor, ...]) -> Tensor:
        if not self.pin_memory:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))

    def _checked(self, start: int, chunks: Sequence[int] | None) -> Sequence[int]:
        everything = range(self.chunks_per_step)
        chunks = everything if chunks is None else chunks
        assert start >= 0
        assert len(chunks) > 0
        assert all(chunk in everything for chunk in chunks), (chunks, everything)
        return chunks


def evaluation_batches(
    source: Source, batch_size: int, fit: Fit, workers: int = 0, indices: Sequence[int] | None = None
) -> Iterator[Batch]:
    """Every image (or those of `indices`) once, in order, not augmented; the last batch may be smaller."""
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} images: choose 1 or more")
    wanted = np.asarray(range(len(source)) if indices is None else indices, dtype=np.int64)

    def made(first: int) -> Batch:
        part = wanted[first : first + batch_size]
        with _advice():
            return as_tensor(fitted(source, part, fit)), torch.from_numpy(source.labels[part])

    return ordered_map(made, range(0, len(wanted), batch_size), workers, 2 * workers)


def as_tensor(images: Planes) -> Tensor:
    """The same bytes as a contiguous tensor."""
    return torch.from_numpy(np.ascontiguousarray(images))


@contextmanager
def _advice() -> Iterator[None]:
    """Tell whoever meets a damaged image what can be done about it."""
    try:
        yield
    except DamagedError as error:
        raise ValueError(f"{error}; {DAMAGE_ADVICE}") from error


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return permutation(length, seed, _ORDER, epoch)
