"""Layouts: which ranks form a lane, what each of them does, and who sends twins to whom. Only arithmetic.

"clean | adv | attack" on 6 ranks:     lane 0: rank 0 clean, rank 1 adv, rank 2 attack
                                       lane 1: rank 3 clean, rank 4 adv, rank 5 attack
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

from conadv.core.roles import Place, Role

_DUTIES = {"clean": Role.CLEAN, "adv": Role.ADV, "attack": Role.ATTACK}


@dataclass(frozen=True)
class Layout:
    """Equal lanes, each of which does the work that one rank would do alone.

    Args:
        roles: what the ranks of a lane do, in their order.
        lanes: how many lanes there are.
    """

    roles: tuple[Role, ...]
    lanes: int

    @classmethod
    def fit(cls, text: str | None, duties: Role, world_size: int) -> Layout:
        """Read a layout, such as "clean | adv", for a method with these duties; None: every rank does them all."""
        roles = (duties,) if text is None else _parse(text, duties)
        lanes, rest = divmod(world_size, len(roles))
        if rest or not lanes:
            sizes = ", ".join(str(len(roles) * n) for n in (1, 2, 3))
            raise ValueError(
                f"layout {_write(roles)!r} has {len(roles)} ranks a lane, which {world_size} do not fill: "
                f"start {sizes}, ... ranks"
            )
        return cls(roles, lanes)

    @property
    def world_size(self) -> int:
        return self.lanes * len(self.roles)

    @property
    def duties(self) -> Role:
        """What the ranks of a lane do between them."""
        return reduce(or_, self.roles)

    def lane(self, rank: int) -> int:
        return rank // len(self.roles)

    def role(self, rank: int) -> Role:
        return self.roles[rank % len(self.roles)]

    def rank(self, lane: int, duty: Role) -> int:
        """The rank of a lane that has a duty."""
        (within,) = [place for place, role in enumerate(self.roles) if duty in role]
        return lane * len(self.roles) + within

    def chunks(self, rank: int, chunks: int) -> range:
        """The numbers of the chunks that a rank's lane works through, of the `chunks` of a global batch."""
        share, rest = divmod(chunks, self.lanes)
        if rest:
            fitting = [n for n in range(1, chunks + 1) if chunks % n == 0]
            raise ValueError(
                f"{chunks} chunks a batch cannot be shared by {self.lanes} lanes: "
                f"take {_listed(fitting)} lanes, or another batch or chunk size"
            )
        return range(self.lane(rank) * share, (self.lane(rank) + 1) * share)

    def place(self, rank: int, chunks: int) -> Place:
        """Where a rank stands when a global batch has `chunks` chunks."""
        mine = self.chunks(rank, chunks)
        return Place(
            self.role(rank), share=1 / self.lanes, first_chunk=mine.start, chunks=len(mine), updates_stats=False
        )

    def maker(self) -> Role:
        """The duty whose rank makes the twins: without an attack of its own, they come with the clean gradient."""
        return Role.ATTACK if any(Role.ATTACK in role for role in self.roles) else Role.CLEAN

    def ahead(self, delay: int) -> int:
        """How many steps before their use twins are made: none where the rank that attacks also learns.

        It has nothing to run beside, and can attack a batch when it learns from it, with the weights of `delay` steps
        ago.
        """
        return 0 if any(Role.ATTACK in role and role != Role.ATTACK for role in self.roles) else delay

    def route(self, rank: int) -> tuple[int, int] | None:
        """From which rank to which the twins of this rank's lane go; None where one rank makes and takes them."""
        if not any(Role.ADV in role for role in self.roles):
            return None
        source, target = self.rank(self.lane(rank), self.maker()), self.rank(self.lane(rank), Role.ADV)
        return None if source == target else (source, target)

    def learners(self) -> list[int]:
        """The ranks that have gradients to add up; a rank that only attacks has none."""
        return [rank for rank in range(self.world_size) if self.role(rank) != Role.ATTACK]

    def follower(self, lane: int) -> tuple[int, int] | None:
        """The rank of a lane that passes the summed gradients on, and the one that only attacks; None: no such rank."""
        if Role.ATTACK not in self.roles:
            return None
        return self.rank(lane, Role.CLEAN), self.rank(lane, Role.ATTACK)

    def describe(self, rank: int) -> str:
        return f"rank {rank} (lane {self.lane(rank)}, {_write((self.role(rank),))})"

    def __str__(self) -> str:
        return _write(self.roles)


def _parse(text: str, duties: Role) -> tuple[Role, ...]:
    roles = tuple(_parse_role(part, text) for part in text.split("|"))
    listed = [duty for role in roles for duty in role]
    for duty in Role:
        if duty in duties and duty not in listed:
            raise ValueError(f"layout {text!r} has no rank for {_name(duty)}: the method needs {_write((duties,))}")
        if duty not in duties and duty in listed:
            raise ValueError(f"layout {text!r} has {_name(duty)}, which the method does not need: {_write((duties,))}")
        if listed.count(duty) > 1:
            raise ValueError(f"layout {text!r} has {_name(duty)} twice: one rank of a lane does it")
    return roles


def _parse_role(part: str, text: str) -> Role:
    role = Role(0)
    for word in part.split("+"):
        duty = _DUTIES.get(word.strip())
        if duty is None:
            raise ValueError(
                f"layout {text!r}: {word.strip()!r} is not a duty: combine clean, adv and attack with + and |"
            )
        if duty in role:
            raise ValueError(f"layout {text!r} has {word.strip()} twice: one rank of a lane does it")
        role |= duty
    return role


def _write(roles: tuple[Role, ...]) -> str:
    return " | ".join("+".join(_name(duty) for duty in role) for role in roles)


def _name(duty: Role) -> str:
    assert duty.name is not None
    return duty.name.lower()


def _listed(numbers: list[int]) -> str:
    shown = [str(number) for number in numbers[:6]]
    return ", ".join(shown) + (", ..." if len(numbers) > 6 else "")
