"""Where the twins of a rank come from: sent by the ranks of its lane that generate them, or generated here.

ATTACK   begin(t, ahead): attack each chunk of the batch ahead, and hand it over
ADV      take(t, k): the next twin that was handed over
both     take(t, k): attack the chunk here, with the weights of `delay` steps ago
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from conadv.core.algorithm import ConAdv, Recycled
from conadv.core.batch import Batch, Chunked, Feed, count_chunks
from conadv.core.roles import Role
from conadv.core.sam import Sam
from conadv.core.state import State
from conadv.core.step import Method, Step
from conadv.core.twins import Left, StaleWeights

from .handoff import RankHandoff


class Attacked:
    """The twins of `ConAdv` on one rank of a layout.

    Args:
        method: the method of this rank.
        step: its steps.
        handoff: sends and receives twins; None: this rank learns from its own.
        stale: the weights of `delay` steps ago to attack with; None: the current ones.
        ahead: how many steps before its own a batch is attacked.
    """

    per_rank = False

    def __init__(
        self, method: ConAdv, step: Step, handoff: RankHandoff | None, stale: StaleWeights | None, ahead: int
    ) -> None:
        self._method, self._step, self._handoff, self._stale = method, step, handoff, stale
        self._attacks = Role.ATTACK in step.place.role
        self.reads_ahead = ahead if self._attacks else 0
        self._attacked = 0  # the number of the next batch to attack

    def begin(self, t: int, ahead: Any) -> None:
        if self._handoff is not None and self._attacks and ahead is not None:
            self.prime(ahead, self._attacked)

    def take(self, t: int, k: int, chunk: Any) -> Batch:
        if self._handoff is not None:
            return self._handoff.take()
        return self._twin(t, k, chunk)

    def end(self) -> None:
        """Do nothing: the caller keeps stale weights."""

    def reset(self) -> None:
        """Do nothing: a step that fails ends all ranks."""

    def state(self) -> tuple[dict[str, Any], State]:
        return {}, {}

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self.resume(about["step"])

    def resume(self, t: int) -> None:
        """Continue at step t; the caller primes the batches that were in flight."""
        self._step.t = self._attacked = t

    def in_flight(self, t: int) -> range:
        """The numbers of the batches whose twins are in flight before step t."""
        return range(t, t + self.reads_ahead)

    def prime(self, batch: Any, number: int) -> None:
        """Attack batch `number` with the current weights, and hand its twins over."""
        own = self._step.batch(batch)
        assert own is not None and self._handoff is not None
        for k, chunk in enumerate(self._step.chunks(own)):
            if self._step.has_twin(self._method.share, number, k):
                self._handoff.put(self._twin(number, k, chunk))
        self._attacked = number + 1

    def feed(self, batches: Iterable[Any]) -> Feed:
        """The pairs of an epoch; the first batches are attacked before its first step."""
        return Feed(self._primed(batches), reads_ahead=self.reads_ahead)

    def _primed(self, batches: Iterable[Any]) -> Iterator[Any]:
        first = self._step.t
        for place, batch in enumerate(batches, 1):
            if self._attacked - first < place <= self.reads_ahead:
                self.prime(batch, self._attacked)
            yield batch

    def _twin(self, t: int, k: int, chunk: Batch) -> Batch:
        with nullcontext() if self._stale is None else self._stale.swapped_in():
            return self._method.twin(t, k, chunk)


class LeftOnRanks(Left):
    """The twins of `Recycled` on one rank of a layout: left in memory, or sent to the rank that learns from them.

    Args:
        method: the method of this rank.
        step: its steps.
        handoff: sends and receives twins; None: this rank learns from its own.
    """

    def __init__(self, method: Recycled, step: Step, handoff: RankHandoff | None) -> None:
        super().__init__(step.model, method.twin)
        self._method, self._step, self._handoff = method, step, handoff
        self._primed = False

    def expect(self, t: int, k: int, along: Callable[[Tensor], Batch]) -> Callable[[Tensor], None]:
        self.hand_over()
        return super().expect(t, k, along)

    def begin(self, t: int, ahead: Any) -> None:
        if self._handoff is None:
            super().begin(t, ahead)

    def source(self, t: int) -> int:
        return max(t - 1, 0) if self._handoff is not None else super().source(t)

    def take(self, t: int, k: int, chunk: Any) -> Batch:
        return super().take(t, k, chunk) if self._handoff is None else self._handoff.take()

    def end(self) -> None:
        super().end()
        self.hand_over()

    def hand_over(self) -> None:
        """Send the twins that have come so far, in the order of their chunks."""
        if self._handoff is None:
            return
        for k in sorted(self._coming):
            twin = self._coming[k]
            if twin is None:
                return
            self._handoff.put(twin)
            del self._coming[k]

    def resume(self, t: int, in_flight: bool = False) -> None:
        """Continue at step t; unless the twins of the step before are in flight already, the caller primes them."""
        if not in_flight:
            self.reset()
        self._step.t, self._primed = t, in_flight

    def in_flight(self, t: int) -> range:
        return range(t - 1, t)

    def prime(self, batch: Any, number: int) -> None:
        """Generate the twins of batch `number` with the current weights, for the next step."""
        own = self._step.batch(batch)
        assert own is not None
        self._step.count = count_chunks(own, self._step.chunk_size)
        twins = [
            self._method.twin(number, k, chunk)
            for k, chunk in enumerate(self._step.chunks(own))
            if self._step.has_twin(self._method.share, number, k)
        ]
        self._primed = True
        if self._handoff is None:
            self.adopt(twins)
        else:
            for twin in twins:
                self._handoff.put(twin)

    def first(self, now: Any) -> Any:
        """Return the batch of a step; the first time, after generating its twins for the rank that learns from them."""
        if self._handoff is None or self._primed or Role.CLEAN not in self._step.place.role:
            return now
        now = listed(now)
        self.prime(now, self._step.t)
        return now


class Uphill:
    """The directions of `Sam` with delay 1 on one rank, which come from the batch of the step before.

    Args:
        method: the method of this rank.
        step: its steps.
    """

    def __init__(self, method: Sam, step: Step) -> None:
        self._method, self._step = method, step

    def resume(self, t: int) -> None:
        """Continue at step t; the caller primes the batch of the step before."""
        self._method.directions.reset()
        self._step.t = t

    def in_flight(self, t: int) -> range:
        return range(t - self._method.delay, t)

    def prime(self, batch: Any, number: int) -> None:
        own = self._step.batch(batch)
        assert own is not None
        self._step.count = count_chunks(own, self._step.chunk_size)
        chunks = enumerate(self._step.chunks(own))
        self._method.directions.adopt([self._method.direction(number, k, chunk) for k, chunk in chunks])


Source = Attacked | LeftOnRanks | Uphill


def source_of(
    method: Method, step: Step, handoff: RankHandoff | None, stale: StaleWeights | None, ahead: int
) -> Source | None:
    """Set where the twins of a method come from on this rank; None if it has none."""
    if isinstance(method, ConAdv):
        attacked = Attacked(method, step, handoff, stale, ahead)
        method.twins = attacked
        return attacked
    if isinstance(method, Recycled):
        left = LeftOnRanks(method, step, handoff)
        method.twins = left
        return left
    return Uphill(method, step) if isinstance(method, Sam) else None


def listed(batch: Any) -> Any:
    """A batch that can be iterated more than once."""
    return Chunked(batch.count, list(batch.chunks)) if isinstance(batch, Chunked) else batch
