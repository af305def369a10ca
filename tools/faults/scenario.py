"""What goes wrong in one run, as a function of a seed: method, layout, delay, and for each attempt a fault.

A fault is a kind (what happens), a moment (a point of the program and how often it has been passed) and its victims.
The ranks inject it themselves (`inject.py`), so that a seed is the same disturbance again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

# Ranks and fields of a run. Lanes of equal work: 4 images in 2 chunks.
CONFIGURATIONS: list[tuple[int, dict[str, Any]]] = [
    (1, {"method": "conadv"}),
    (1, {"method": "recycled"}),
    (2, {"method": "vanilla"}),
    (2, {"method": "sam"}),
    (2, {"method": "conadv", "delay": 2}),
    (2, {"method": "conadv", "delay": 0, "layout": "clean | adv+attack"}),
    (2, {"method": "recycled", "layout": "clean | adv"}),
    (2, {"method": "recycled", "layout": "clean+adv"}),
    (2, {"method": "disadv", "layout": "clean | adv+attack"}),
    (2, {"method": "conadv", "delay": 2, "layout": "clean+adv | attack"}),
    (3, {"method": "conadv", "layout": "clean | adv | attack"}),
    (3, {"method": "conadv", "delay": 3, "layout": "clean | adv | attack"}),
    (4, {"method": "recycled", "layout": "clean | adv"}),
    (4, {"method": "disadv", "layout": "clean+adv | attack"}),
    (4, {"method": "conadv", "delay": 2, "layout": "clean | 2 adv | attack"}),
]
STEPS = 8
REAL_SHARE = 0.05  # of the runs: each rank of the first attempt is an interpreter of its own

# Points of the program, and about how often a run passes them.
OF_ANY_RANK = {"start": 1, "join": 1, "broadcast": 6, "pass": 4 * STEPS, "sum": 3 * STEPS, "timer": 60}
OF_SEVERAL = {"send": 16, "receive": 16}
OF_RANK_0 = {"write": STEPS, "fsync": 3 * STEPS, "rename": STEPS, "remove": 2 * STEPS}

# What the run survives without a restart, what ends it, and what needs more than one process.
HARMLESS = ("pause", "slow disk", "delayed message", "clock jump")
ENDING = ("SIGKILL", "SIGTERM", "SIGSTOP", "full disk", "failing fsync", "failing rename", "lost messages", "reset")
KINDS = (*HARMLESS, *ENDING, "kill twice", "kill during resume", "flag mismatch", "two processes", "agent", "restart")
_WEIGHTS = {"SIGKILL": 16, "SIGTERM": 4, "kill twice": 16, "kill during resume": 10}


@dataclass(frozen=True)
class Fault:
    """One disturbance of one attempt."""

    kind: str
    point: str
    number: int
    """Which passage of the point, from 1 on; for `timer`, hundredths of a second from the start of the rank, and for
    `after`, from the end of the first rank."""
    victims: tuple[int, ...]


@dataclass(frozen=True)
class Scenario:
    """A run, and what happens to each of its attempts; one more attempt without a fault follows."""

    seed: int
    kind: str
    size: int
    fields: dict[str, Any]
    attempts: tuple[tuple[Fault, ...], ...]
    """The faults of each attempt; no two have the same victim."""
    is_real: bool
    """Whether the ranks of the first attempt are interpreters of their own, not forks of one."""

    @classmethod
    def from_seed(cls, seed: int, kinds: tuple[str, ...] = KINDS) -> Scenario:
        random = Random(seed)
        kind = random.choices(kinds, [_WEIGHTS.get(name, 1) for name in kinds])[0]
        usable = [entry for entry in CONFIGURATIONS if entry[0] > 1 or kind not in _OF_SEVERAL_RANKS]
        size, fields = random.choice(usable)
        attempts = tuple(_attempts(random, kind, size))
        return cls(seed, kind, size, fields, attempts, random.random() < REAL_SHARE)


_OF_SEVERAL_RANKS = ("SIGSTOP", "delayed message", "lost messages", "reset", "flag mismatch", "agent", "restart")
_EARLY = {"start": 1, "join": 1, "broadcast": 6, "pass": 6, "sum": 3, "timer": 30}
_LATER = {"write": 1, "fsync": 4, "rename": 2, "remove": 4}


def _attempts(random: Random, kind: str, size: int) -> list[tuple[Fault, ...]]:
    match kind:
        case "SIGKILL":
            return [_kills(random, size)]
        case "kill twice":
            return [_kills(random, size) for _ in range(random.randint(2, 6))]
        case "kill during resume":
            points = [_EARLY if random.random() < 0.7 else _LATER for _ in range(2)]
            return [_kills(random, size), *(_kills(random, size, some) for some in points)]
    return [(_fault(random, kind, size),)]


def _kills(random: Random, size: int, points: dict[str, int] | None = None) -> tuple[Fault, ...]:
    """Some ranks are killed at one point of the program; some of the others while they notice."""
    first = _at(random, "SIGKILL", size, points, count=random.choice((1, random.randint(1, size), size)))
    others = [rank for rank in range(size) if rank not in first.victims]
    hunted = tuple(sorted(random.sample(others, random.randint(0, len(others)))))
    return (first, Fault("SIGKILL", "after", random.randint(0, 200), hunted)) if hunted else (first,)


def _fault(random: Random, kind: str, size: int) -> Fault:
    match kind:
        case "failing fsync" | "failing rename":
            point = kind.split()[1]
            return Fault(kind, point, random.randint(1, OF_RANK_0[point]), (0,))
        case "full disk" | "slow disk":
            return _at(random, kind, 1, points={**OF_RANK_0, "pass": 4 * STEPS})
        case "delayed message" | "lost messages":
            return _at(random, kind, size, points={**OF_SEVERAL, "sum": 3 * STEPS})
        case "agent":  # 0: while its ranks start
            return Fault(kind, "step", random.randint(0, STEPS - 4), (random.randrange(size),))
        case "flag mismatch" | "restart":
            return Fault(kind, "step", random.randint(1, STEPS - 2), (random.randrange(size),))
        case "two processes":
            return Fault(kind, "pass", random.randint(2, 12), (0,))
    return _at(random, kind, size)


def _at(random: Random, kind: str, size: int, points: dict[str, int] | None = None, count: int = 1) -> Fault:
    """A fault of this kind at a random point; what only rank 0 passes has it as its victim."""
    if points is None:
        points = OF_ANY_RANK | OF_RANK_0 | (OF_SEVERAL if size > 1 else {})
    point = random.choice([*points])
    victims = (0,) if point in OF_RANK_0 else tuple(sorted(random.sample(range(size), min(count, size))))
    return Fault(kind, point, random.randint(1, points[point]), victims)
