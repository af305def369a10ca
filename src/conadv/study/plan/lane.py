"""The critical path of a step: which rank of a lane waits for which, by method and layout.

conadv, "clean | adv | attack", delay 1, two chunks per lane (one lane of three ranks):

    clean    |c0 c0 c0|c1 c1 c1|··reduce··|update|
    adv      |a0 a0 a0|a1 a1 a1|··reduce··|update|     a: twins that were handed over a step ago
    attack   |k0 k0|k1 k1|              |update|
                  └ put └ put ───────────────────► take, at the start of the next step

With counts, as in "3 clean | 3 adv | 2 attack", each rank of a role has an equal part of the lane's chunks, and each
rank that makes twins has a link of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.core.roles import Role
from conadv.parallel.layout import Layout

LEARNING = Role.CLEAN | Role.ADV


@lru_cache(256)
def fit_lane(text: str, duties: Role) -> Layout | None:
    """One lane of a layout; None if the layout does not have exactly these duties."""
    try:
        return Layout.lane_of(text, duties)
    except ValueError:
        return None


@dataclass(frozen=True)
class Chain:
    """One path that may be critical: seconds of work by role number, and seconds of waiting."""

    work: Mapping[int, float]
    wait: float

    @property
    def seconds(self) -> float:
        return sum(self.work.values()) + self.wait


@dataclass(frozen=True)
class Lane:
    """The ranks that share one portion of the batch, and how long each of them takes."""

    roles: tuple[Role, ...]
    """The roles, each once, in the order of the layout."""
    maker: Role | None
    """The duty that makes twins."""
    delay: int
    """Steps between making a twin and learning from it."""
    chunks: int
    """Chunks per step."""
    duties: Mapping[Role, float]
    """Seconds per chunk."""
    ranks: tuple[int, ...]
    """The number of ranks of each role."""
    twins: tuple[int, int] = (1, 1)
    """How many of every few chunks have twins: (1, 4) is one of four."""

    @cached_property
    def loops(self) -> tuple[float, ...]:
        """Mean seconds per chunk, by role: a rank does all its duties on a chunk before the next chunk."""
        share = self.twins[0] / self.twins[1]
        return tuple(
            sum(self.duties[duty] * (1 if duty is Role.CLEAN else share) for duty in role) for role in self.roles
        )

    @property
    def width(self) -> int:
        """Ranks of the lane."""
        return sum(self.ranks)

    @cached_property
    def rank_work(self) -> tuple[float, ...]:
        """Busy seconds per step of one rank, by role."""
        return tuple(self.chunks / count * loop for count, loop in zip(self.ranks, self.loops, strict=True))

    @property
    def work(self) -> float:
        """Busy seconds of all ranks of the lane."""
        return self.chunks * sum(self.loops)

    @property
    def _is_even(self) -> bool:
        return set(self.ranks) == {1} and self.twins[0] == self.twins[1]

    @cached_property
    def route(self) -> tuple[int, int] | None:
        """The numbers of the roles that make twins and learn from them; None if no twin leaves its rank."""
        if self.maker is None:
            return None
        source, target = (
            next(n for n, role in enumerate(self.roles) if duty in role) for duty in (self.maker, Role.ADV)
        )
        return None if source == target else (source, target)

    def chains(self, transfer: float, reduction: float, update: float) -> tuple[Chain, ...]:
        """The paths of a step; the longest is the critical path.

        Args:
            transfer: seconds to send the twin of a chunk.
            reduction: seconds of the all-reduce that are not overlapped.
            update: seconds of the optimizer.
        """
        roles = tuple(
            Chain({number: self.rank_work[number]}, update + (reduction if role & LEARNING else 0.0))
            for number, role in enumerate(self.roles)
        )
        if self.route is None:
            return roles
        maker, taker = self.route
        # A late twin holds up the rank that takes it, and so the start of the next step. From the start of the step
        # that makes the twin to that one are delay + 1 steps, which together last as long as all that happens between.
        steps, learning = self.delay + 1, self.rank_work[taker]
        early, late = self._lag(0.0), self._lag(transfer)
        round_trip = Chain({taker: learning / steps, maker: early / steps}, (roles[taker].wait + late - early) / steps)
        return (*roles, round_trip, Chain({}, self._sent_by_one * transfer))

    def hidden_transfer(self, step: float, reduction: float, update: float) -> float:
        """The longest `transfer` that does not lengthen a step of `step` seconds."""
        if not self._is_even:
            return self._searched_transfer(step, reduction, update)
        first, maker, taker = self._pace()
        rest = self.chunks - 1
        slack = (self.delay + 1) * step - self.chunks * taker - reduction - update - first
        limits = (slack, slack + rest * (taker - maker), (slack + rest * taker) / self.chunks, step / self.chunks)
        return max(0.0, min(limits))

    def _lag(self, transfer: float) -> float:
        """How much later twins arrive than they are needed, if both ranks start together and never wait.

        The i-th twin is ready at first + i·maker, follows the one before it over the link, and is taken at i·taker:
        linear in i on both sides, so the first or the last is the worst.
        """
        if not self._is_even:
            return self._longest_lag(transfer)
        first, maker, taker = self._pace()
        rest = self.chunks - 1
        last = first + max(rest * maker + transfer, self.chunks * transfer)
        return max(first + transfer, last - rest * taker)

    @cached_property
    def has_twins(self) -> NDArray[np.bool_]:
        """Whether each chunk has a twin. The last of every few have, which is the worst case for the receiving rank."""
        some, of = self.twins
        return np.asarray(np.arange(self.chunks) % of >= of - some)

    @property
    def _sent_by_one(self) -> float:
        """Messages per step of the rank that sends the most."""
        assert self.route is not None
        return float(max(map(np.sum, np.array_split(self.has_twins, self.ranks[self.route[0]]))))

    def _searched_transfer(self, step: float, reduction: float, update: float) -> float:
        low, high = 0.0, step
        for _ in range(50):
            middle = (low + high) / 2
            longest = max(chain.seconds for chain in self.chains(middle, reduction, update))
            low, high = (middle, high) if longest <= step * (1 + 1e-9) else (low, middle)
        return low

    def _pace(self) -> tuple[float, float, float]:
        """When the first twin is ready, and seconds per chunk of the ranks that make and take twins."""
        assert self.route is not None
        maker, taker = (self.loops[number] for number in self.route)
        # An attack is the first thing that a rank does with a chunk; recycled twins are ready at the end.
        first = self.duties[Role.ATTACK] if self.maker is Role.ATTACK else maker
        return first, maker, taker

    def _longest_lag(self, transfer: float) -> float:
        """The lag, computed chunk by chunk."""
        assert self.route is not None
        (makers, seconds, starts), (_, _, takes) = map(self._played, self.route)
        ready = starts + (self.duties[Role.ATTACK] if self.maker is Role.ATTACK else seconds)
        lag = -np.inf
        for own in makers:
            sent = own[self.has_twins[own]]
            order = np.arange(len(sent))
            arrivals = (order + 1) * transfer + np.maximum.accumulate(ready[sent] - order * transfer)
            lag = max(lag, *(arrivals - takes[sent])) if len(sent) else lag
        return float(lag)

    def _played(self, number: int) -> tuple[list[NDArray[Any]], NDArray[Any], NDArray[Any]]:
        """The chunks of each rank of a role, the seconds of each chunk, and when it starts if the rank never waits."""
        role = self.roles[number]
        always = self.duties[Role.CLEAN] if Role.CLEAN in role else 0.0
        seconds = always + sum(self.duties[duty] for duty in role if duty is not Role.CLEAN) * self.has_twins
        chunks = np.split(np.arange(self.chunks), self.ranks[number])
        return chunks, seconds, np.concatenate([np.cumsum(seconds[own]) - seconds[own] for own in chunks])
