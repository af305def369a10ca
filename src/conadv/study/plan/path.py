"""The critical path of a step: who waits for whom in a lane, by method and layout.

conadv, "clean | adv | attack", delay 1, two chunks a lane (one lane of three ranks):

    clean    |c0 c0 c0|c1 c1 c1|··reduce··|update|
    adv      |a0 a0 a0|a1 a1 a1|··reduce··|update|     a: twins that were handed over a step ago
    attack   |k0 k0|k1 k1|              |update|
                  └ put └ put ───────────────────► take, at the start of the next step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .cost import Method

Roles = tuple[frozenset[str], ...]

METHODS: tuple[Method, ...] = ("vanilla", "disadv", "conadv", "recycled")
DUTIES: dict[Method, frozenset[str]] = {
    "vanilla": frozenset({"clean"}),
    "disadv": frozenset({"clean", "adv", "attack"}),
    "conadv": frozenset({"clean", "adv", "attack"}),
    "recycled": frozenset({"clean", "adv"}),
}
LAYOUTS = (
    "clean",
    "clean+adv",
    "clean | adv",
    "clean+adv+attack",
    "clean | adv+attack",
    "clean+adv | attack",
    "clean | adv | attack",
)


def parse_layout(text: str) -> Roles:
    """The roles of a lane: "clean+adv | attack" has two, of two duties and one."""
    roles = tuple(frozenset(duty.strip() for duty in role.split("+")) for role in text.split("|"))
    duties = [duty.strip() for role in text.split("|") for duty in role.split("+")]
    if set(duties) not in DUTIES.values() or len(set(duties)) != len(duties):
        raise ValueError(
            f'layout "{text}": join clean, adv and attack, each once, by + and |, as in "clean+adv | attack"'
        )
    return roles


def fits(method: Method, roles: Roles) -> bool:
    """Whether a layout has the duties of a method, and no other."""
    return frozenset().union(*roles) == DUTIES[method]


@dataclass(frozen=True)
class Chain:
    """Work that the step waits for: seconds by the number of the role that does them, and seconds of no rank."""

    work: Mapping[int, float]
    wait: float

    @property
    def seconds(self) -> float:
        return sum(self.work.values()) + self.wait


@dataclass(frozen=True)
class Lane:
    """The ranks that together do one rank's work, and how long each duty takes a chunk."""

    method: Method
    roles: Roles
    delay: int
    chunks: int
    duties: Mapping[str, float]

    @cached_property
    def loops(self) -> tuple[float, ...]:
        """Seconds a chunk, by role: a rank does all its duties on a chunk, then turns to the next."""
        return tuple(sum(self.duties[duty] for duty in role) for role in self.roles)

    @property
    def work(self) -> float:
        """Busy seconds of all ranks of the lane."""
        return self.chunks * sum(self.loops)

    @property
    def maker(self) -> int | None:
        """The role that makes twins."""
        return self._role("clean" if self.method == "recycled" else "attack")

    @property
    def taker(self) -> int | None:
        """The role that learns from twins."""
        return self._role("adv")

    @property
    def hands_over(self) -> bool:
        """Whether twins cross from one rank to another."""
        return self.maker != self.taker and self.taker is not None

    def chains(self, transfer: float, reduction: float, update: float) -> tuple[Chain, ...]:
        """All that a step waits for; `transfer`: seconds a chunk's twin is under way, `reduction`: what shows of it."""
        roles = tuple(
            Chain({number: self.chunks * self.loops[number]}, update + (reduction if role & {"clean", "adv"} else 0.0))
            for number, role in enumerate(self.roles)
        )
        if not self.hands_over:
            return roles
        assert self.maker is not None and self.taker is not None
        # A twin that is late holds up its taker, and so the start of the next step: from the start of the step that
        # makes it to that one lie delay + 1 steps, which together last as long as all that has to happen in between.
        steps, learning = self.delay + 1, self.chunks * self.loops[self.taker]
        early, late = self._lag(0.0), self._lag(transfer)
        round_trip = Chain(
            {self.taker: learning / steps, self.maker: early / steps},
            (roles[self.taker].wait + late - early) / steps,
        )
        return (*roles, round_trip, Chain({}, self.chunks * transfer))

    def hidden_transfer(self, step: float, reduction: float, update: float) -> float:
        """The longest time under way of a chunk's twin that does not lengthen a step of `step` seconds."""
        first, maker, taker = self._pace()
        rest = self.chunks - 1
        slack = (self.delay + 1) * step - self.chunks * taker - reduction - update - first
        limits = (slack, slack + rest * (taker - maker), (slack + rest * taker) / self.chunks, step / self.chunks)
        return max(0.0, min(limits))

    def _lag(self, transfer: float) -> float:
        """How much later twins arrive than they would be taken, if both ranks began together and never waited.

        The i-th twin is ready at first + i·maker, follows the one before it over the link, and is taken at i·taker:
        linear in i on both sides, so the first or the last is the worst.
        """
        first, maker, taker = self._pace()
        rest = self.chunks - 1
        last = first + max(rest * maker + transfer, self.chunks * transfer)
        return max(first + transfer, last - rest * taker)

    def _pace(self) -> tuple[float, float, float]:
        """When the first twin is ready, and the seconds a chunk of the rank that makes and the one that takes."""
        assert self.maker is not None and self.taker is not None
        maker = self.loops[self.maker]
        # An attack is the first thing that a rank does with a chunk; recycled twins fall out at the end.
        first = maker if self.method == "recycled" else self.duties["attack"]
        return first, maker, self.loops[self.taker]

    def _role(self, duty: str) -> int | None:
        return next((number for number, role in enumerate(self.roles) if duty in role), None)
