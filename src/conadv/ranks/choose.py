"""`--layout auto`: the layout of a method whose busiest rank has the least work, counted in passes. Only arithmetic.

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
    lanes = [Layout.fit(text, method.duties).roles for text in method.layouts]
    for roles in list(lanes):
        if Role.ATTACK in roles:  # as many of them as keep up with the ranks that learn
            learning = [role for role in roles if role != Role.ATTACK]
            needed = math.ceil(method.passes[Role.ATTACK] / _busiest(Layout(tuple(learning), 1), method))
            lanes.append((*learning, *[Role.ATTACK] * needed))
    fitting = [Layout(roles, world_size // len(roles)) for roles in lanes if world_size % len(roles) == 0]
    fitting = [layout for layout in fitting if chunks % (layout.lanes * layout.smallest()) == 0]
    if not fitting:
        texts = ", ".join(f'"{text}"' for text in method.layouts)
        divisors = [number for number in range(1, chunks + 1) if chunks % number == 0]
        sizes = sorted({number * len(roles) for number in divisors for roles in lanes})
        raise ValueError(
            f"no layout of {method.name} ({texts}) fits {world_size} ranks and {chunks} chunks per batch: start "
            f"{', '.join(map(str, sizes[:8]))}{', ...' * (len(sizes) > 8)} ranks, or change --batch-size or "
            "--chunk-size"
        )

    def passes(layout: Layout) -> tuple[float, int]:
        waits = delay == 0 and Role.ATTACK in layout.roles  # fresh twins: learning waits for the first chunk
        work = chunks // layout.lanes * _busiest(layout, method) + (method.passes[Role.ATTACK] if waits else 0)
        return work, len(layout.roles)

    return min(fitting, key=passes)


def _busiest(layout: Layout, method: MethodInfo) -> float:
    """Count the passes over a chunk of the lane that its busiest rank makes."""
    return max(sum(method.passes[duty] for duty in role) / count for role, count in layout.counts.items())
