"""Layouts: which ranks form a lane, what each of them does, and who sends twins to whom. Only arithmetic.

"clean | adv | attack" on 6 ranks:     lane 0: rank 0 clean, rank 1 adv, rank 2 attack
                                       lane 1: rank 3 clean, rank 4 adv, rank 5 attack

"2 clean | 2 adv | attack" on 5 ranks, 4 chunks: each role shares the chunks of its lane evenly
    clean    rank 0: chunks 0 1     rank 1: chunks 2 3
    adv      rank 2: chunks 0 1     rank 3: chunks 2 3
    attack   rank 4: chunks 0 1 2 3, sends the twins of 0 and 1 to rank 2, those of 2 and 3 to rank 3
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import reduce
from operator import or_

from conadv.core.roles import Place, Role

_DUTIES = {"clean": Role.CLEAN, "adv": Role.ADV, "attack": Role.ATTACK}
_COUNTED = re.compile(r"\s*(?:([0-9]{1,6})\s+)?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Layout:
    """Equal lanes, each of which does the work that one rank would do alone.

    Args:
        roles: what the ranks of a lane do, in their order; those with the same role are neighbours.
        lanes: how many lanes there are.
    """

    roles: tuple[Role, ...]
    lanes: int

    @classmethod
    def fit(cls, text: str | None, duties: Role, world_size: int) -> Layout:
        """Read a layout, such as "clean | adv" or "3 clean | 3 adv | 2 attack", for a method with these duties.

        Args:
            text: roles of the ranks of a lane, each with a count if more than one rank has it. None: every rank does
                everything.
            duties: what the method needs.
            world_size: number of ranks, which whole lanes have to fill.
        """
        groups = [(1, duties)] if text is None else _parse(text, duties)
        width = sum(count for count, _ in groups)
        lanes, rest = divmod(world_size, width)
        if rest or not lanes:
            sizes = ", ".join(str(width * n) for n in (1, 2, 3))
            raise ValueError(
                f"layout {_write(groups)!r} needs a multiple of {width} ranks, and {_ranks(world_size)} started: "
                f"start {sizes}, ... ranks"
            )
        return cls(tuple(role for count, role in groups for _ in range(count)), lanes)

    @classmethod
    def lane_of(cls, text: str, duties: Role) -> Layout:
        """Read a layout and make one lane of it, however many ranks it has."""
        return cls.fit(text, duties, sum(count for count, _ in _parse(text, duties)))

    @staticmethod
    def duties_in(text: str) -> Role:
        """What the ranks of a layout do between them, for a method that is not known yet."""
        return reduce(or_, (_parse_group(part, text)[1] for part in text.split("|")))

    @property
    def world_size(self) -> int:
        return self.lanes * len(self.roles)

    @property
    def duties(self) -> Role:
        """What the ranks of a lane do between them."""
        return reduce(or_, self.roles)

    @property
    def counts(self) -> dict[Role, int]:
        """How many ranks of a lane have each role, in the order of the layout."""
        return {role: self.roles.count(role) for role in dict.fromkeys(self.roles)}

    def lane(self, rank: int) -> int:
        return rank // len(self.roles)

    def role(self, rank: int) -> Role:
        return self.roles[rank % len(self.roles)]

    def ranks(self, lane: int, duty: Role) -> range:
        """The ranks of a lane that share a duty."""
        within = [place for place, role in enumerate(self.roles) if duty in role]
        first = lane * len(self.roles) + within[0]
        return range(first, first + len(within))

    def lane_chunks(self, rank: int, chunks: int) -> range:
        """The numbers of the chunks that a rank's lane works through, of the `chunks` of a global batch."""
        share, rest = divmod(chunks, self.lanes)
        if rest:
            raise ValueError(
                f"{chunks} chunks per batch cannot be shared by {self.lanes} lanes: "
                f"take {_divisors(chunks)} lanes, or another batch or chunk size"
            )
        return range(self.lane(rank) * share, (self.lane(rank) + 1) * share)

    def chunks(self, rank: int, chunks: int) -> range:
        """The numbers of the chunks that a rank works through: an equal share of its lane's for each rank of a role."""
        lane = self.lane_chunks(rank, chunks)
        role = self.role(rank)
        self._check_counts(len(lane))
        place = rank % len(self.roles) - self.roles.index(role)
        each = len(lane) // self.counts[role]
        return lane[place * each : (place + 1) * each]

    def check_twins(self, chunks: int, of: int) -> None:
        """Refuse chunks of which the ranks that make or take twins would not have equally many with twins.

        Args:
            chunks: of a global batch.
            of: twins are of some of every `of` consecutive chunks.
        """
        lane = len(self.lane_chunks(0, chunks))
        self._check_counts(lane)
        fitting = self.smallest(of)
        if lane % fitting:
            raise ValueError(
                f"layout {str(self)!r} with twins of a part of every {of} chunks cannot share {lane} chunks per lane: "
                f"take a multiple of {fitting} chunks per lane (change the batch, the chunk size or the lanes)"
            )

    def smallest(self, of: int = 1) -> int:
        """The fewest chunks of a lane that its ranks can share, with twins of some of every `of` chunks."""
        shared = [count for role, count in self.counts.items() if role != Role.CLEAN]
        return math.lcm(of, *(of * count for count in shared), *self.counts.values())

    def place(self, rank: int, chunks: int) -> Place:
        """Where a rank stands when a global batch has `chunks` chunks."""
        mine = self.chunks(rank, chunks)
        return Place(
            self.role(rank),
            share=1 / (self.lanes * self.counts[self.role(rank)]),
            first_chunk=mine.start,
            chunks=len(mine),
            chunk_offset=mine.start - self.lane_chunks(rank, chunks).start,
            updates_stats=False,
        )

    def maker(self) -> Role:
        """The duty whose rank makes the twins: without an attack of its own, they come with the clean gradient."""
        return Role.ATTACK if Role.ATTACK in self.duties else Role.CLEAN

    def ahead(self, delay: int) -> int:
        """How many steps before their use twins are made: none where the rank that attacks also learns.

        It has nothing to overlap with, and can attack a batch when it learns from it, with the weights of `delay` steps
        ago.
        """
        return 0 if any(Role.ATTACK in role and role != Role.ATTACK for role in self.roles) else delay

    @property
    def hands_over(self) -> bool:
        """Whether twins are sent: not where the rank that makes them also learns from them."""
        return Role.ADV in self.duties and not any(Role.ADV in role and self.maker() in role for role in self.roles)

    def owner(self, duty: Role, chunk: int, chunks: int) -> int:
        """The rank that has a duty for one of the `chunks` of a global batch."""
        lane, within = divmod(chunk, chunks // self.lanes)
        ranks = self.ranks(lane, duty)
        return ranks[within * len(ranks) // (chunks // self.lanes)]

    def learners(self) -> list[int]:
        """The ranks that have gradients to add up; a rank that only attacks has none."""
        return [rank for rank in range(self.world_size) if self.role(rank) != Role.ATTACK]

    def followers(self) -> dict[int, int]:
        """The ranks that only attack, each with the learning rank of its lane that passes summed gradients on to it."""
        width = len(self.roles)
        learning = sorted((role != Role.ATTACK, Role.CLEAN in role, -place) for place, role in enumerate(self.roles))
        sources = [-place for learns, _, place in reversed(learning) if learns]
        attacking = [place for place, role in enumerate(self.roles) if role == Role.ATTACK]
        return {
            lane * width + place: lane * width + sources[number % len(sources)]
            for lane in range(self.lanes)
            for number, place in enumerate(attacking)
        }

    def describe(self, rank: int) -> str:
        return f"rank {rank} (lane {self.lane(rank)}, {_name_role(self.role(rank))})"

    def __str__(self) -> str:
        return _write([(count, role) for role, count in self.counts.items()])

    def _check_counts(self, lane: int) -> None:
        for role, count in self.counts.items():
            if lane % count:
                whole = math.lcm(*self.counts.values())
                raise ValueError(
                    f"layout {str(self)!r}: {count} {_name_role(role)} ranks cannot share {lane} chunks per lane: take "
                    f"{_divisors(lane)} of them, or {whole}, {2 * whole}, ... chunks per lane"
                )


def _parse(text: str, duties: Role) -> list[tuple[int, Role]]:
    groups = [_parse_group(part, text) for part in text.split("|")]
    listed = [duty for _, role in groups for duty in role]
    for duty in Role:
        if duty in duties and duty not in listed:
            raise ValueError(f"layout {text!r} has no rank for {_name(duty)}: the method needs {_name_role(duties)}")
        if duty not in duties and duty in listed:
            raise ValueError(
                f"layout {text!r} has {_name(duty)}, which the method does not do: use only {_name_role(duties)}"
            )
        if listed.count(duty) > 1:
            raise ValueError(f'layout {text!r} has {_name(duty)} twice: for several ranks write a count, "2 clean"')
    return groups


def _parse_group(part: str, text: str) -> tuple[int, Role]:
    """How many ranks, and what they do."""
    match = _COUNTED.fullmatch(part)
    assert match is not None
    count, words = int(match[1] or 1), match[2]
    if count < 1:
        raise ValueError(f"layout {text!r} has 0 ranks for {words.strip()!r}: take 1 or more")
    role = Role(0)
    for word in words.split("+"):
        duty = _DUTIES.get(word.strip())
        if duty is None:
            raise ValueError(
                f"layout {text!r}: {word.strip()!r} is not a role: "
                "use clean, adv and attack, joined by + (on the same rank) or | (on separate ranks)"
            )
        if duty in role:
            raise ValueError(f"layout {text!r} has {word.strip()} twice: one rank of a lane does it")
        role |= duty
    return count, role


def _write(groups: list[tuple[int, Role]]) -> str:
    return " | ".join((f"{count} " if count > 1 else "") + _name_role(role) for count, role in groups)


def _name_role(role: Role) -> str:
    return "+".join(_name(duty) for duty in role)


def _name(duty: Role) -> str:
    assert duty.name is not None
    return duty.name.lower()


def _ranks(number: int) -> str:
    return "1 was" if number == 1 else f"{number} were"


def _divisors(number: int) -> str:
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
