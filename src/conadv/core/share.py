"""Which part of a batch gets twins: some of every few chunks or, without chunks, some of the images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from .batch import Batch
from .seeds import mix, uniform

_SHARE = 3  # what its random numbers are for, besides those of attacks and forward passes


@dataclass(frozen=True)
class TwinShare:
    """`some` of every `of` chunks, other ones in each step, as a function of the seed.

    Args:
        some: chunks with twins.
        of: consecutive chunks that they are chosen from.
    """

    some: int = 1
    of: int = 1

    @classmethod
    def from_number(cls, share: float | str | Fraction) -> TwinShare:
        """Convert a number such as 0.25, "1/4" or Fraction(1, 4)."""
        try:
            fraction = Fraction(share).limit_denominator(1000)
        except (ValueError, ArithmeticError):  # no number, 1/0 or infinity
            fraction = Fraction(0)
        if not 0 < fraction <= 1:
            raise ValueError(f"twin_share {share}: a share of the batch, above 0 and at most 1, such as 1/4")
        return cls(fraction.numerator, fraction.denominator)

    def __float__(self) -> float:
        return self.some / self.of

    def count(self, chunks: int) -> int:
        """How many of `chunks` chunks have twins."""
        if chunks % self.of:
            raise ValueError(
                f"twin_share {self.some}/{self.of} of {chunks} chunks per lane: "
                f"take a number of chunks that {self.of} divides (change the batch, the chunk size or the lanes)"
            )
        return chunks // self.of * self.some

    def has(self, seed: int, batch: int, first_chunk: int, number: int) -> bool:
        """Whether a chunk has twins.

        Args:
            seed: of the run.
            batch: number of the batch.
            first_chunk: number, within the global batch, of the first chunk of this process or its lane.
            number: of the chunk, counted from there.
        """
        if self.some == self.of:
            return True
        place = number % self.of
        group = first_chunk + number - place
        order = sorted(range(self.of), key=lambda other: mix(seed, _SHARE, batch, group, other))
        return place in order[: self.some]

    def images_of(self, chunk: Batch, seed: int) -> Tensor | None:
        """The numbers of the images that get twins, if a batch is not cut into chunks; None: all of them."""
        if self.some == self.of:
            return None
        size = len(chunk.images)
        wanted = max(min(2, size), round(size * float(self)))  # BatchNorm needs two
        return uniform((size,), mix(seed, _SHARE), chunk.images).argsort()[:wanted].sort().values


def select(chunk: Batch, images: Tensor | None) -> Batch:
    """Select some images of a chunk, with their labels and extra inputs."""
    if images is None:
        return chunk
    size = len(chunk.images)

    def one(tensor: Tensor) -> Tensor:
        return tensor[images] if tensor.dim() and len(tensor) == size else tensor

    def some(values: Any) -> Any:
        return tree_map_only(Tensor, one, values)

    return replace(chunk, images=one(chunk.images), labels=some(chunk.labels), augmented=None, extra=some(chunk.extra))
