"""`--layout auto`: choose the layout of a method that fits the ranks and has the shortest step. Only arithmetic."""

from __future__ import annotations

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
    fitting = [layout for text in method.layouts if (layout := _fit(text, method, world_size, chunks)) is not None]
    if not fitting:
        texts = ", ".join(f'"{text}"' for text in method.layouts)
        raise ValueError(
            f"no layout of {method.name} ({texts}) fits {world_size} ranks and {chunks} chunks per batch: start "
            f"{_sizes(method, chunks)} ranks, or change --batch-size or --chunk-size"
        )
    return min(fitting, key=lambda layout: (_passes(layout, method, delay, chunks), len(layout.roles)))


def _fit(text: str, method: MethodInfo, world_size: int, chunks: int) -> Layout | None:
    ranks = len(Layout.lane_of(text, method.duties).roles)
    if world_size % ranks or world_size < ranks or chunks % (world_size // ranks):
        return None
    return Layout.fit(text, method.duties, world_size)


def _passes(layout: Layout, method: MethodInfo, delay: int, chunks: int) -> float:
    """Count the passes over a chunk that the busiest rank makes in a step."""
    busiest = max(sum(method.passes[duty] for duty in role) / count for role, count in layout.counts.items())
    waits = delay == 0 and Role.ATTACK in layout.roles  # fresh twins: learning waits for the first chunk
    return chunks // layout.lanes * busiest + (method.passes[Role.ATTACK] if waits else 0)


def _sizes(method: MethodInfo, chunks: int) -> str:
    lanes = [number for number in range(1, chunks + 1) if chunks % number == 0]
    ranks = {len(Layout.lane_of(text, method.duties).roles) for text in method.layouts}
    sizes = sorted({number * width for number in lanes for width in ranks})
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
