"""Layouts: which ranks form a lane, what each rank does, and which rank sends twins to which. Only arithmetic.

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
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import cycle
from operator import or_

from conadv.catalog import MethodInfo
from conadv.roles import Place, Role

_DUTIES = {"clean": Role.CLEAN, "adv": Role.ADV, "attack": Role.ATTACK}
_COUNTED = re.compile(r"\s*(?:([1-9][0-9]{0,5})\s+)?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Layout:
    """Ranks in equal lanes; the ranks of a lane share the work that a single rank would do alone.

    Args:
        roles: the role of each rank of a lane; ranks with the same role are consecutive.
        lanes: the number of lanes.
    """

    roles: tuple[Role, ...]
    lanes: int

    @classmethod
    def fit(cls, text: str | None, duties: Role | None = None, world_size: int | None = None) -> Layout:
        """Parse a layout, such as "clean | adv" or "3 clean | 3 adv | 2 attack", for a number of ranks.

        Args:
            text: the roles of a lane, each with a count if several ranks have it. None: every rank does everything.
            duties: the duties of the method, all of which the layout must have. None: it is not known yet.
            world_size: the number of ranks, a multiple of the ranks of a lane. None: as many as one lane needs.
        """
        groups = [(1, duties or reduce(or_, Role))] if text is None else _parse(text, duties)
        width = sum(count for count, _ in groups)
        world_size = width if world_size is None else world_size
        lanes, rest = divmod(world_size, width)
        if rest or not lanes:
            started = "1 was" if world_size == 1 else f"{world_size} were"
            raise ValueError(
                f"layout {_write(groups)!r} needs a multiple of {width} ranks, and {started} started: "
                f"start {width}, {2 * width}, {3 * width}, ... ranks"
            )
        return cls(tuple(role for count, role in groups for _ in range(count)), lanes)

    @property
    def world_size(self) -> int:
        return self.lanes * len(self.roles)

    @property
    def duties(self) -> Role:
        return reduce(or_, self.roles)

    @property
    def counts(self) -> dict[Role, int]:
        """The number of ranks per lane of each role, in the order of the layout."""
        return {role: self.roles.count(role) for role in dict.fromkeys(self.roles)}

    def lane(self, rank: int) -> int:
        return rank // len(self.roles)

    def role(self, rank: int) -> Role:
        return self.roles[rank % len(self.roles)]

    def ranks(self, lane: int) -> range:
        """Return the ranks of a lane."""
        return range(lane * len(self.roles), (lane + 1) * len(self.roles))

    def unit(self, of: int = 1) -> int:
        """Return the number of chunks of which a batch needs a multiple, so that the ranks can share them equally.

        Args:
            of: a number of consecutive chunks that ranks with twins do not divide.
        """
        with_twins = [of * count for role, count in self.counts.items() if role != Role.CLEAN]
        return self.lanes * math.lcm(of, *with_twins, *self.counts.values())

    def check(self, chunks: int, share: Fraction = Fraction(1), shuffled: int = 1) -> None:
        """Raise a ValueError if the ranks of a role cannot share chunks and twins equally.

        Args:
            chunks: how many chunks a global batch has.
            share: the part of them that has twins, the same number in every group of consecutive chunks.
            shuffled: how many consecutive chunks of twins are shuffled together, all of them on one rank.
        """
        of = share.denominator
        if chunks % self.unit(of):
            twins = f" with twins of some of every {of} chunks" if of > 1 else ""
            raise ValueError(
                f"layout {str(self)!r} on {self.world_size} ranks{twins} needs a multiple of {self.unit(of)} chunks "
                f"per batch, and there are {chunks}: change the batch size, the chunk size or the ranks"
            )
        learning = sum(count for role, count in self.counts.items() if Role.ADV in role) or 1
        own = chunks // self.lanes // learning // of * share.numerator
        if own % shuffled:
            raise ValueError(
                f"shuffle_twins {shuffled} needs a multiple of {shuffled} chunks with twins on each rank that learns "
                f"from them, and it has {own}: lower the chunk size, or change the batch or the ranks"
            )

    def chunks(self, rank: int, chunks: int) -> range:
        """Return the chunks of a rank: those of its lane are shared equally by the ranks with the same role."""
        self.check(chunks)
        role, lane = self.role(rank), chunks // self.lanes
        each = lane // self.counts[role]
        first = self.lane(rank) * lane + (rank % len(self.roles) - self.roles.index(role)) * each
        return range(first, first + each)

    def place(self, rank: int, chunks: int) -> Place:
        """Return the place of a rank, if a global batch has `chunks` chunks."""
        mine = self.chunks(rank, chunks)
        return Place(self.role(rank), chunks, len(self.learners()), first_chunk=mine.start, chunks=len(mine))

    def maker(self) -> Role:
        """Return the duty that generates twins: the attack or, without one, the clean backward pass."""
        return Role.ATTACK if Role.ATTACK in self.duties else Role.CLEAN

    @property
    def hands_over(self) -> bool:
        """Whether twins are sent between ranks: not if the rank that generates them also learns from them."""
        return Role.ADV in self.duties and not any(Role.ADV in role and self.maker() in role for role in self.roles)

    def owner(self, duty: Role, chunk: int, chunks: int) -> int:
        """Return the rank that has a duty for one of the `chunks` of a global batch."""
        ranks = self.ranks(chunk * self.lanes // chunks)
        return next(rank for rank in ranks if duty in self.role(rank) and chunk in self.chunks(rank, chunks))

    def learners(self) -> list[int]:
        """Return the ranks that have gradients; a rank that only attacks has none."""
        return [rank for rank in range(self.world_size) if self.role(rank) != Role.ATTACK]

    def followers(self) -> dict[int, int]:
        """Return the ranks that only attack, each with the learning rank of its lane that sends it weights."""
        found: dict[int, int] = {}
        for lane in map(self.ranks, range(self.lanes)):
            attacking = [rank for rank in lane if self.role(rank) == Role.ATTACK]
            learning = [rank for rank in lane if self.role(rank) != Role.ATTACK]
            found |= dict(zip(attacking, cycle(learning), strict=False))
        return found

    def describe(self, rank: int) -> str:
        """Return the name of a rank in messages, such as "rank 1 (lane 0, adv)"."""
        return f"rank {rank} (lane {self.lane(rank)}, {_name_role(self.role(rank))})"

    def __str__(self) -> str:
        return _write([(count, role) for role, count in self.counts.items()])


def choose_layout(method: MethodInfo, delay: int, world_size: int, chunks: int) -> Layout:
    """Choose, for `--layout auto`, the layout of a method whose busiest rank has the least work, counted in passes.

    Learning from a chunk costs 3 passes, an attack of k steps 2 k. So ⌈2 k / 3⌉ ranks that only attack keep up with a
    rank that learns; with fewer of them, the attack sets the step time. All ranks are used. Of several layouts with
    equal work, the one with the fewest ranks per lane is chosen.
    """
    lanes = [Layout.fit(text, method.duties).roles for text in method.layouts]
    for roles in list(lanes):
        if Role.ATTACK in roles:  # as many of them as keep up with the ranks that learn
            learning = [role for role in roles if role != Role.ATTACK]
            needed = math.ceil(method.passes[Role.ATTACK] / _busiest(Layout(tuple(learning), 1), method))
            lanes.append((*learning, *[Role.ATTACK] * needed))
    fitting = [Layout(roles, world_size // len(roles)) for roles in lanes if world_size % len(roles) == 0]
    fitting = [layout for layout in fitting if chunks % layout.unit() == 0]
    if not fitting:
        texts = ", ".join(f'"{text}"' for text in method.layouts)
        raise ValueError(
            f"no layout of {method.name} ({texts}) fits {world_size} ranks and {chunks} chunks per batch: change the "
            "ranks, --batch-size or --chunk-size"
        )

    def passes(layout: Layout) -> tuple[float, int]:
        waits = delay == 0 and Role.ATTACK in layout.roles  # fresh twins: learning waits for the first chunk
        work = chunks // layout.lanes * _busiest(layout, method) + (method.passes[Role.ATTACK] if waits else 0)
        return work, len(layout.roles)

    return min(fitting, key=passes)


def _busiest(layout: Layout, method: MethodInfo) -> float:
    """Count the passes over a chunk of the lane that its busiest rank makes."""
    return max(sum(method.passes[duty] for duty in role) / count for role, count in layout.counts.items())


def _parse(text: str, duties: Role | None) -> list[tuple[int, Role]]:
    """Parse the roles of a lane, such as "2 clean | adv+attack", to counts and roles; None: of any method."""
    groups = []
    for part in text.split("|"):
        match = _COUNTED.fullmatch(part)
        assert match is not None
        words = [word.strip() for word in match[2].split("+")]
        for word in words:
            if word not in _DUTIES:
                raise ValueError(
                    f"layout {text!r}: {word!r} is not a role: "
                    "use clean, adv and attack, joined by + (on the same rank) or | (on separate ranks)"
                )
        groups.append((int(match[1] or 1), [_DUTIES[word] for word in words]))
    listed = [duty for _, some in groups for duty in some]
    needed = duties or reduce(or_, listed)
    if Counter(listed) != Counter(needed):
        raise ValueError(
            f"layout {text!r} has {', '.join(map(_name, listed))}, and needs each of {_name_role(needed)} once, and no "
            'other: for several ranks write a count, "2 clean"'
        )
    roles = [(count, reduce(or_, some)) for count, some in groups]
    if any(role == Role.CLEAN | Role.ATTACK for _, role in roles):
        raise ValueError(
            f"layout {text!r} sends twins from clean+attack ranks: let the ranks that learn from twins attack, with as "
            'much work and no messages ("clean | adv+attack")'
        )
    return roles


def _write(groups: list[tuple[int, Role]]) -> str:
    return " | ".join((f"{count} " if count > 1 else "") + _name_role(role) for count, role in groups)


def _name_role(role: Role) -> str:
    return "+".join(_name(duty) for duty in role)


def _name(duty: Role) -> str:
    assert duty.name is not None
    return duty.name.lower()
