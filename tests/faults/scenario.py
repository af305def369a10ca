"""What goes wrong in one run, as a function of a seed: method, layout, delay, and for each attempt a fault.

A fault is a kind (what happens), a moment (a point of the program and how often it has been passed) and its victims.
The ranks inject it themselves (`inject.py`), so that a seed is the same disturbance again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

# Ranks and fields of a run. Lanes of equal work: 24 images in 6 chunks.
CONFIGURATIONS: list[tuple[int, dict[str, Any]]] = [
    (1, {"method": "conadv"}),
    (1, {"method": "recycled", "ema": 0.9}),
    (2, {"method": "vanilla"}),
    (2, {"method": "sam"}),
    (2, {"method": "conadv", "delay": 2}),
    (2, {"method": "recycled", "layout": "clean | adv"}),
    (2, {"method": "recycled", "layout": "clean+adv"}),
    (2, {"method": "disadv", "layout": "clean | adv+attack"}),
    (2, {"method": "conadv", "delay": 2, "layout": "clean+adv | attack"}),
    (3, {"method": "conadv", "layout": "clean | adv | attack"}),
    (3, {"method": "conadv", "delay": 3, "layout": "clean | adv | attack"}),
    (4, {"method": "recycled", "layout": "clean | adv"}),
    (4, {"method": "disadv", "layout": "clean+adv | attack"}),
]
STEPS = 8

# Points of the program, and about how often a run passes them.
OF_ANY_RANK = {"start": 1, "join": 1, "broadcast": 6, "pass": 60, "sum": 3 * STEPS, "timer": 60}
OF_SEVERAL = {"send": 40, "receive": 40}
OF_RANK_0 = {"write": 2 * STEPS, "fsync": 5 * STEPS, "rename": 2 * STEPS, "remove": 3 * STEPS}

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
    """Which passage of the point, from 1 on; for `timer`, hundredths of a second."""
    victims: tuple[int, ...]


@dataclass(frozen=True)
class Scenario:
    """A run, and what happens to each of its attempts; one more attempt without a fault follows."""

    seed: int
    kind: str
    size: int
    fields: dict[str, Any]
    faults: tuple[Fault, ...]

    @classmethod
    def from_seed(cls, seed: int, kinds: tuple[str, ...] = KINDS) -> Scenario:
        random = Random(seed)
        kind = random.choices(kinds, [_WEIGHTS.get(name, 1) for name in kinds])[0]
        usable = [entry for entry in CONFIGURATIONS if entry[0] > 1 or kind not in _OF_SEVERAL_RANKS]
        size, fields = random.choice(usable)
        return cls(seed, kind, size, fields, tuple(_faults(random, kind, size)))


_OF_SEVERAL_RANKS = ("SIGSTOP", "delayed message", "lost messages", "reset", "flag mismatch", "agent", "restart")


def _faults(random: Random, kind: str, size: int) -> list[Fault]:
    match kind:
        case "kill twice":
            both = random.random() < 0.3
            return [_at(random, "SIGKILL", size, count=2 if both else 1) for _ in range(random.choice((2, 3, 4)))]
        case "kill during resume":
            early = {"start": 1, "join": 1, "broadcast": 6, "pass": 6, "sum": 3, "timer": 30}
            later = {"write": 2, "fsync": 6, "rename": 3, "remove": 6}
            return [_at(random, "SIGKILL", size)] + [
                _at(random, "SIGKILL", size, points=early if random.random() < 0.7 else later) for _ in range(2)
            ]
        case "failing fsync" | "failing rename":
            point = kind.split()[1]
            return [Fault(kind, point, random.randint(1, OF_RANK_0[point]), (0,))]
        case "full disk" | "slow disk":
            return [_at(random, kind, 1, points={**OF_RANK_0, "pass": 60})]
        case "delayed message" | "lost messages":
            return [_at(random, kind, size, points={**OF_SEVERAL, "sum": 3 * STEPS})]
        case "flag mismatch" | "agent" | "restart":
            return [Fault(kind, "step", random.randint(1, STEPS - 2), (random.randrange(size),))]
        case "two processes":
            return [Fault(kind, "pass", random.randint(2, 30), (0,))]
    return [_at(random, kind, size)]


def _at(random: Random, kind: str, size: int, points: dict[str, int] | None = None, count: int = 1) -> Fault:
    """A fault of this kind at a random point; what only rank 0 passes has it as its victim."""
    if points is None:
        points = OF_ANY_RANK | OF_RANK_0 | (OF_SEVERAL if size > 1 else {})
    point = random.choice([*points])
    victims = (0,) if point in OF_RANK_0 else tuple(sorted(random.sample(range(size), min(count, size))))
    return Fault(kind, point, random.randint(1, points[point]), victims)
