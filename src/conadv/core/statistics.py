"""Statistics of all split layers at once, so that a device gets a few operations per step instead of some per layer.

forward pass ──► each layer writes mean and variance into a view of one buffer ──► pending += buffer, one operation
end of step  ──► running statistics of all layers are updated with the pending ones, in about fifteen operations
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Tally:
    """The BatchNorm statistics of one forward pass.

    Args:
        pending: By branch of a layer, the buffer that its statistics are added to: sums of means and of variances
            (2 × channels) and, last, the number of passes.
    """

    def __init__(self, pending: dict[nn.Module, Tensor]) -> None:
        self._pending = pending
        self._free: dict[nn.Module, Tensor] = {}
        self._used: list[tuple[Tensor, Tensor]] = []

    def room(self, branch: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Zeros for the mean and variance of a branch; None if it is not known, or runs a second time."""
        if not self._free and not self._used:
            self._free = _zeros_like_sums(self._pending)
        own = self._free.pop(branch, None)
        if own is None:
            return None
        self._used.append((self._pending[branch], own))
        mean, var = own.chunk(2)
        return mean, var

    @torch.no_grad()
    def add(self) -> None:
        """Add the statistics of the pass to the pending ones."""
        if self._used:
            torch._foreach_add_([pending[:-1] for pending, _ in self._used], [own for _, own in self._used])
            torch._foreach_add_([pending[-1] for pending, _ in self._used], 1)


class Tracked(NamedTuple):
    """The tensors of one branch of a layer that an update of its running statistics needs."""

    pending: Tensor
    mean: Tensor
    var: Tensor
    batches: Tensor
    momentum: float | None
    """None: the mean over all steps."""


@torch.no_grad()
def move(all_tracked: Sequence[Tracked]) -> None:
    """Update running statistics with the mean over the pending passes, without waiting for the device."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[Tracked]] = defaultdict(list)
    for tracked in all_tracked:
        groups[tracked.pending.device, tracked.pending.dtype].append(tracked)
    for group in groups.values():
        seen: set[int] = set()
        rounds: list[list[Tracked]] = []  # tensors that two layers share are updated once for each of them
        for tracked in group:
            if not rounds or id(tracked.mean) in seen or id(tracked.batches) in seen:
                rounds.append([])
                seen = set()
            rounds[-1].append(tracked)
            seen |= {id(tracked.mean), id(tracked.batches)}
        for part in rounds:
            _move(part)


def _move(group: list[Tracked]) -> None:
    passes = torch.stack([tracked.pending[-1] for tracked in group])
    seen = passes > 0
    batches = torch.stack([tracked.batches for tracked in group]).add_(seen)
    torch._foreach_copy_([tracked.batches for tracked in group], list(batches.unbind()))
    share = _momentum(group, batches, passes) * seen
    sizes = [tracked.mean.numel() for tracked in group for _ in range(2)]
    of_channel = torch.stack([share, passes.clamp(min=1)])
    spread = _spread(of_channel, [len(tracked.pending) - 1 for tracked in group])
    target = torch.cat([tracked.pending[:-1] for tracked in group]) / spread[1]
    running = [tensor for tracked in group for tensor in (tracked.mean, tracked.var)]
    moved = torch.cat(running).lerp_(target, spread[0])
    torch._foreach_copy_(running, list(moved.split(sizes)))
    torch._foreach_zero_([tracked.pending for tracked in group])


def _momentum(group: list[Tracked], batches: Tensor, like: Tensor) -> Tensor:
    """The momentum of each branch. Filled on the device: a copy from the host would wait."""
    values = [tracked.momentum for tracked in group]
    known = {value for value in values if value is not None}
    if len(known) <= 1 and None not in values:
        return torch.full_like(like, known.pop())
    mean = 1 / batches.clamp(min=1).to(like.dtype)
    if not known:
        return mean
    for value in known:
        for place, own in enumerate(values):
            if own == value:
                mean[place].fill_(value)
    return mean


def _spread(rows: Tensor, sizes: Iterable[int]) -> Tensor:
    """Repeat each column a given number of times."""
    parts = [column.expand(-1, size) for column, size in zip(rows.split(1, dim=1), sizes, strict=True)]
    return torch.cat(parts, dim=1)


def _zeros_like_sums(pending: dict[nn.Module, Tensor]) -> dict[nn.Module, Tensor]:
    """Zeros for the sums of each layer, without the number of passes: views of one tensor per device and dtype."""
    groups: defaultdict[tuple[torch.device, torch.dtype], list[nn.Module]] = defaultdict(list)
    for layer, own in pending.items():
        groups[own.device, own.dtype].append(layer)
    views: dict[nn.Module, Tensor] = {}
    for (device, dtype), layers in groups.items():
        sizes = [len(pending[layer]) - 1 for layer in layers]
        flat = torch.zeros(sum(sizes), device=device, dtype=dtype)
        views |= dict(zip(layers, flat.split(sizes), strict=True))
    return views
