"""Layouts by the work of their ranks: the one that `--layout auto` takes, and how many ranks attacks need. Arithmetic.

Learning from a chunk costs 3 passes, an attack of k steps 2 k. So ⌈2 k / 3⌉ ranks that only attack keep up with a rank
that learns; with fewer of them, the attack sets the step time.
"""

from __future__ import annotations

import math

from conadv.catalog import MethodInfo
from conadv.core.roles import Role

from .layout import Layout


def choose_layout(method: MethodInfo, delay: int, world_size: int, chunks: int) -> Layout:
    """Choose among the layouts of a method by the work of the busiest rank, counted in passes over a chunk.

    Args:
        method: The method.
        delay: Age, in steps, of the weights that twins are generated with.
        world_size: The number of ranks, all of which are used.
        chunks: Chunks of a global batch, which the lanes share equally.

    Returns:
        The layout. Of several with equal work, the one with the fewest ranks per lane.
    """
    lanes = [Layout.lane_of(text, method.duties) for text in method.layouts]
    lanes += [with_attackers(lane, needed) for lane in lanes if (needed := attackers_needed(lane, method)) > 1]
    fitting = [layout for lane in lanes if (layout := _repeated(lane, world_size, chunks)) is not None]
    if not fitting:
        texts = ", ".join(f'"{text}"' for text in method.layouts)
        raise ValueError(
            f"no layout of {method.name} ({texts}) fits {world_size} ranks and {chunks} chunks per batch: start "
            f"{_sizes(lanes, chunks)} ranks, or change --batch-size or --chunk-size"
        )
    return min(fitting, key=lambda layout: (_passes(layout, method, delay, chunks), len(layout.roles)))


def attackers_needed(layout: Layout, method: MethodInfo) -> int:
    """Return how many ranks that only attack keep up with those of the lane that learn; 0: the layout has none."""
    if Role.ATTACK not in layout.roles:
        return 0
    learning = max(_work(role, method) / count for role, count in layout.counts.items() if role != Role.ATTACK)
    return math.ceil(method.passes[Role.ATTACK] / learning)


def with_attackers(layout: Layout, number: int) -> Layout:
    """Return the layout with another number of ranks per lane that only attack."""
    counts = {**layout.counts, Role.ATTACK: number}
    return Layout(tuple(role for role, count in counts.items() for _ in range(count)), layout.lanes)


def slow_attack(layout: Layout, method: MethodInfo, delay: int, chunks: int, of: int = 1) -> str | None:
    """Say that the attack sets the step time, and what keeps it off the critical path; None: it does not.

    Args:
        layout: The layout.
        method: The method, with the passes that its attack costs.
        delay: Age, in steps, of the weights that twins are generated with. With 0, learning waits for every attack.
        chunks: Chunks of a global batch.
        of: Of every `of` consecutive chunks, the same number has twins.
    """
    needed, lane = attackers_needed(layout, method), chunks // layout.lanes
    if delay == 0 or needed <= layout.counts.get(Role.ATTACK, 0):
        return None
    wider = (with_attackers(layout, number) for number in range(needed, lane + 1))
    fitting = next((f"layout {str(one)!r}, or " for one in wider if lane % one.smallest(of) == 0), "")
    return (
        f"each attack rank of layout {str(layout)!r} takes longer than the ranks that learn, and sets the step time: "
        f"{needed} per lane keep up with them; take {fitting}{needed} attackers of a pool (conadv.ray.Pool) and "
        f"delay {needed}"
    )


def _repeated(lane: Layout, world_size: int, chunks: int) -> Layout | None:
    """As many equal lanes as there are ranks for; None if they do not fit."""
    lanes, rest = divmod(world_size, len(lane.roles))
    if rest or not lanes or chunks % lanes or chunks // lanes % lane.smallest():
        return None
    return Layout(lane.roles, lanes)


def _passes(layout: Layout, method: MethodInfo, delay: int, chunks: int) -> float:
    """Count the passes over a chunk that the busiest rank makes in a step."""
    busiest = max(_work(role, method) / count for role, count in layout.counts.items())
    waits = delay == 0 and Role.ATTACK in layout.roles  # fresh twins: learning waits for the first chunk
    return chunks // layout.lanes * busiest + (method.passes[Role.ATTACK] if waits else 0)


def _work(role: Role, method: MethodInfo) -> int:
    return sum(method.passes[duty] for duty in role)


def _sizes(lanes: list[Layout], chunks: int) -> str:
    numbers = [number for number in range(1, chunks + 1) if chunks % number == 0]
    sizes = sorted({number * len(lane.roles) for number in numbers for lane in lanes})
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
