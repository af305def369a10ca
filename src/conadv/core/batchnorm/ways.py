"""How images go through the split layers of a model: the branch, the statistics, and when these are updated."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .tally import Tally

# When running statistics are updated: in each forward pass (as in BatchNorm), once at the end of a step, or never.
Tracking = Literal["now", "step", "off"]


class Joint(NamedTuple):
    """One pass for several parts of a chunk: the branch of each, and how many images it has, in their order."""

    branches: tuple[str, ...]
    sizes: tuple[int, ...]


Branch = str | Joint


class Way(NamedTuple):
    """How images go through a layer at the moment."""

    branch: Branch = "main"
    batch_statistics: bool | None = None  # None: by the layer's training flag
    # "again": recomputed by activation checkpointing; its statistics were counted in the first pass.
    tracking: Tracking | Literal["again"] = "now"
    routed: bool = False  # False: the default, outside of `route`
    tally: Tally | None = None  # where statistics of the pass are collected, with tracking "step"
