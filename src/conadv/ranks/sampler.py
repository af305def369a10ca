"""The images of each rank of a Team, in each step.

The order of an epoch depends only on the seed and the epoch, so results do not depend on the layout. The images that do
not fill the last batch are left out, different ones in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


class TeamSampler(Sampler[list[int]]):
    """Yields the indices of the images that one rank sees in each step; `own`: which images of a batch these are."""

    def __init__(self, data: Sized, batch_size: int, own: slice, seed: int, shuffle: bool = True) -> None:
        if len(data) < batch_size:
            raise ValueError(f"{len(data)} images do not fill a batch of {batch_size}: take a smaller batch")
        self._size, self._batch_size, self._own = len(data), batch_size, own
        self._seed, self._shuffle = seed, shuffle
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch, which decides the order, as in PyTorch's DistributedSampler.

        Args:
            epoch: the number of the epoch.
            start: the first batch to yield, to resume in the middle of an epoch.
        """
        self._epoch, self._start = epoch, start

    def __len__(self) -> int:
        return max(0, self._size // self._batch_size - self._start)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._size)
        if self._shuffle:
            # No epoch of one seed has the order of an epoch of another, for seeds below 2**31. PyTorch takes 63 bits.
            generator = torch.Generator().manual_seed(((self._seed << 32) + self._epoch) % 2**63)
            order = torch.randperm(self._size, generator=generator)
        for batch in order.split(self._batch_size)[self._start : self._start + len(self)]:
            yield batch[self._own].tolist()
