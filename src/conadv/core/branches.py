"""Layers with a branch for each kind of image: their tensors, how images go through one, and their running statistics.

              ┌► main: the layer's own tensors ─┐
x ──► way? ───┤                                 ├──► y, and pending running statistics
              └► adv:  tensors of a child ──────┘

Statistics of all layers are handled at once, so that a device gets a few operations per step instead of some per layer:
forward pass ──► each layer writes mean and variance into a view of one buffer ──► pending += buffer, one operation
end of step  ──► running statistics of all layers are updated with the pending ones, in about fifteen operations
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, eq
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as synchronized_batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from conadv.wrappers import group_size

# When running statistics are updated: in each forward pass (as in BatchNorm), once at the end of a step, or never.
Tracking = Literal["now", "step", "off"]

_UNKNOWN_BRANCH = (
    "a split BatchNorm layer ran again (activation checkpointing) in a backward pass outside of `route`, and its "
    "branch is not known there: call backward() within the `with route(...)` of the forward pass"
)
_CLASSES: dict[type[nn.Module], type[SplitLayer]] = {}


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
            sums, counts, own = [], [], []
            for pending, found in self._used:
                sums.append(pending[:-1])
                counts.append(pending[-1])
                own.append(found)
            torch._foreach_add_(sums, own)
            torch._foreach_add_(counts, 1)


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
    groups: dict[tuple[torch.device, torch.dtype, int], list[Tracked]] = {}
    times: dict[int, int] = {}  # tensors that two layers share are updated once for each of them
    for tracked in all_tracked:
        turn = max(times.get(id(tracked.mean), 0), times.get(id(tracked.batches), 0))
        times[id(tracked.mean)] = times[id(tracked.batches)] = turn + 1
        groups.setdefault((tracked.pending.device, tracked.pending.dtype, turn), []).append(tracked)
    for group in groups.values():
        _move(group)


def _move(group: list[Tracked]) -> None:
    pending, counts, sums, batches = [], [], [], []
    running: list[Tensor] = []
    sizes: list[int] = []
    for tracked in group:
        pending.append(tracked.pending)
        counts.append(tracked.pending[-1])
        sums.append(tracked.pending[:-1])
        batches.append(tracked.batches)
        running += tracked.mean, tracked.var
        sizes += tracked.mean.numel(), tracked.var.numel()
    passes = torch.stack(counts)
    seen = passes > 0
    moved_batches = torch.stack(batches).add_(seen)
    torch._foreach_copy_(batches, list(moved_batches.unbind()))
    of_layer = torch.stack([_momentum(group, moved_batches, passes) * seen, passes.clamp(min=1)])
    columns = []
    for column, own in zip(of_layer.split(1, dim=1), sums, strict=True):
        columns.append(column.expand(-1, len(own)))
    share, divisor = torch.cat(columns, dim=1)
    moved = torch.cat(running).lerp_(torch.cat(sums) / divisor, share)
    torch._foreach_copy_(running, list(moved.split(sizes)))
    torch._foreach_zero_(pending)


def _momentum(group: list[Tracked], batches: Tensor, like: Tensor) -> Tensor:
    """The momentum of each branch. Filled on the device: a copy from the host would wait."""
    first = group[0].momentum
    if first is not None and all(map(partial(eq, first), map(attrgetter("momentum"), group))):
        return torch.full_like(like, first)
    mean = 1 / batches.clamp(min=1).to(like.dtype)
    for number, tracked in enumerate(group):
        if tracked.momentum is not None:
            mean[number].fill_(tracked.momentum)
    return mean


def _zeros_like_sums(pending: dict[nn.Module, Tensor]) -> dict[nn.Module, Tensor]:
    """Zeros for the sums of each layer, without the number of passes: views of one tensor per device and dtype."""
    groups: defaultdict[tuple[torch.device, torch.dtype], dict[nn.Module, int]] = defaultdict(dict)
    for layer, own in pending.items():
        groups[own.device, own.dtype][layer] = len(own) - 1
    views: dict[nn.Module, Tensor] = {}
    for (device, dtype), sizes in groups.items():
        flat = torch.zeros(sum(sizes.values()), device=device, dtype=dtype)
        views |= dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
    return views


class Way(NamedTuple):
    """How images go through a layer at the moment."""

    branch: str = "main"
    batch_statistics: bool | None = None  # None: by the layer's training flag
    # "again": recomputed by activation checkpointing; its statistics were counted in the first pass.
    tracking: Tracking | Literal["again"] = "now"
    routed: bool = False  # False: the default, outside of `route`
    tally: Tally | None = None  # where statistics of the pass are collected, with tracking "step"


# It writes nothing, but a compiler would remove an operation without side effects.
@torch.library.custom_op("conadv::require_forward_pass", mutates_args=("pending",))
def _require_forward_pass(pending: Tensor) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(_UNKNOWN_BRANCH)


class SplitLayer(nn.Module):
    """A layer with further branches; which one an image goes through is set by `route`.

    A layer is converted in place, so that hooks and references stay. Outside of `route` it behaves as before, also for
    code that checks its class.
    """

    plain: ClassVar[type[nn.Module]]
    """The class of the layer before the split."""
    way: Way | None
    """None: closed, while a backward pass covers several branches."""
    branches: tuple[str, ...]
    left_main: bool
    """Whether the user routed images through another branch, whose backward pass may come later."""

    walked: str | None
    """The branch that the current backward pass is in, as set by a mark of a method's loss; None: not known."""

    def grow(self, branches: Mapping[str, nn.Module]) -> None:
        """Add branches to a layer that was just converted."""
        self.way, self.branches, self.left_main = Way(), ("main", *branches), False
        self.walked = None
        for name, branch in branches.items():
            self.add_module(name, branch)
        for owner in self.owners().values():
            pending = self._new_pending(owner)
            if pending is not None:
                owner.register_buffer("pending", pending, persistent=False)
        self.register_load_state_dict_pre_hook(_fill_branches)

    def owners(self) -> dict[str, nn.Module]:
        """The module that holds the weights and statistics of each branch."""
        return {name: self.owner(name) for name in self.branches}

    def owner(self, branch: str) -> nn.Module:
        owner = self if branch == "main" else self._modules[branch]
        assert owner is not None
        return owner

    def update(self, owner: nn.Module) -> None:
        """Update the running statistics of one branch with the pending ones, without waiting for the device."""
        raise NotImplementedError

    def _new_pending(self, owner: nn.Module) -> Tensor | None:
        """Sums over forward passes and, last, their number; None for a branch without running statistics."""
        raise NotImplementedError

    def _current_way(self) -> Way:
        if self.way is None:
            raise RuntimeError(
                "a split BatchNorm layer ran again in a backward pass that covers several branches: activation "
                "checkpointing needs DistributedDataParallel without static_graph"
            )
        unknown = self.left_main and not self.way.routed
        if torch.compiler.is_compiling():  # whether this is a backward pass is known when the graph runs
            walked = self.walked is not None and not self.way.routed
            if (unknown or walked) and "pending" in self._buffers:
                _require_forward_pass(self.get_buffer("pending"))
            return self.way
        if torch._C._current_graph_task_id() == -1:
            if self.walked is not None:  # left by a backward pass that raised
                self.walked = None
            return self.way
        if self.walked is not None and not self.way.routed:
            return Way(self.walked, self.way.batch_statistics, "again")
        if unknown:
            raise RuntimeError(_UNKNOWN_BRANCH)
        return self.way if self.way.tracking == "off" else self.way._replace(tracking="again")

    def _count(self, owner: nn.Module, statistics: list[Tensor], tracking: str) -> None:
        """Add the statistics of one forward pass to the pending ones."""
        owner.get_buffer("pending").add_(torch.cat([*statistics, statistics[0].new_ones(1)]))
        if tracking == "now":
            self.update(owner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the original class: the class of this layer has no name in a module."""
        return (_blank, (self.plain,), *super().__reduce_ex__(protocol)[2:])


class SplitBatchNorm(SplitLayer, _BatchNorm):
    """BatchNorm layers of torch, and of classes that inherit their forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        branch, batch_statistics, tracking, _, tally = self._current_way()
        owner = self.owner(branch)
        assert isinstance(owner, _BatchNorm)
        if owner.running_mean is None or owner.running_var is None:
            return self._normalize(x, owner, None, None)
        if not (self.training if batch_statistics is None else batch_statistics):
            # Cloned, since DistributedDataParallel overwrites buffers between two forward passes and their backward.
            mean, var = owner.running_mean.clone(), owner.running_var.clone()
            return F.batch_norm(x, mean, var, owner.weight, owner.bias, False, 0.0, owner.eps)
        if tracking == "off":
            return self._normalize(x, owner, None, None)
        if tracking == "step" and tally is not None and not self._is_copy():
            room = tally.room(owner)
            if room is not None:
                return self._normalize(x, owner, *room)
        # With momentum 1 the kernel writes the statistics of this batch into the buffers that it is given.
        mean, var = torch.zeros_like(owner.running_mean), torch.zeros_like(owner.running_var)
        y = self._normalize(x, owner, mean, var)
        if tracking != "again":
            self._count(owner, [mean, var], tracking)
        return y

    def update(self, owner: nn.Module) -> None:
        move([self.tracked(owner)])

    def tracked(self, owner: nn.Module) -> Tracked:
        """The tensors of one branch that an update of its running statistics needs."""
        assert isinstance(owner, _BatchNorm)
        mean, var, batches = owner.running_mean, owner.running_var, owner.num_batches_tracked
        assert mean is not None and var is not None and batches is not None
        return Tracked(owner.get_buffer("pending"), mean, var, batches, owner.momentum)

    def _is_copy(self) -> bool:
        """Whether Python state of this pass would be lost: in a compiled graph, or in a replica of DataParallel."""
        return torch.compiler.is_compiling() or "_is_replica" in vars(self)

    def _new_pending(self, owner: nn.Module) -> Tensor | None:
        mean = owner._buffers["running_mean"]
        return None if mean is None else mean.new_zeros(2 * self.num_features + 1)

    def _normalize(self, x: Tensor, owner: _BatchNorm, mean: Tensor | None, var: Tensor | None) -> Tensor:
        if isinstance(self, nn.SyncBatchNorm):
            group, ranks = group_size(self.process_group)
            if ranks > 1:
                if x.device.type == "cpu":
                    raise ValueError("SyncBatchNorm has no CPU kernel: use BatchNorm1d, 2d or 3d there")
                arguments = (x, owner.weight, owner.bias, mean, var, owner.eps, 1.0, group, ranks)
                return synchronized_batch_norm.apply(*arguments)  # type: ignore[no-any-return]
        return F.batch_norm(x, mean, var, owner.weight, owner.bias, True, 1.0, owner.eps)


class SplitOwnForward(SplitLayer):
    """A layer with its own forward pass, which runs with the tensors of a branch in place of the layer's.

    It works on copies of the buffers. Its changes to them are averaged over the forward passes of a step: for a moving
    average, that is one update with the mean over the passes, as in `SplitBatchNorm`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        branch, batch_statistics, tracking, *_ = self._current_way()
        owner, own = self.owner(branch), (self._parameters, self._buffers, self.training)
        lent: dict[str, Tensor | None] = {**owner._buffers, **{name: old.clone() for name, old in _tracked(owner)}}
        try:
            self._parameters, self._buffers = owner._parameters, lent
            if batch_statistics is not None:
                self.training = batch_statistics
            y = super().forward(*args, **kwargs)
            changed = self._buffers  # a forward pass may write into a buffer or replace it
        finally:
            self._parameters, self._buffers, self.training = own
        pending = owner._buffers.get("pending")
        if pending is not None and tracking in ("now", "step"):
            changes = [_change(old, changed[name]).flatten().to(pending) for name, old in _tracked(owner)]
            self._count(owner, changes, tracking)
        return y

    def update(self, owner: nn.Module) -> None:
        pending = owner.get_buffer("pending")
        buffers = [buffer for _, buffer in _tracked(owner)]
        mean = pending[:-1] / pending[-1].clamp(min=1)
        for buffer, change in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
            _add_change(buffer, change.view_as(buffer))
        pending.zero_()

    def _new_pending(self, owner: nn.Module) -> Tensor | None:
        buffers = [buffer for _, buffer in _tracked(owner)]
        if not buffers:
            return None
        like = next((buffer for buffer in buffers if buffer.is_floating_point()), buffers[0].float())
        return like.new_zeros(sum(buffer.numel() for buffer in buffers) + 1)


def split_layers(model: nn.Module) -> list[SplitLayer]:
    layers = []
    for module in model.modules():
        if isinstance(module, SplitLayer):
            layers.append(module)
    return layers


def split_class(plain: type[nn.Module]) -> type[SplitLayer]:
    """The class of split layers for a class of layers, created once for each."""
    if plain not in _CLASSES:
        kind = SplitBatchNorm if _inherits_forward(plain) else SplitOwnForward
        _CLASSES[plain] = type(f"Split{plain.__name__}", (kind, plain), {"plain": plain})
    return _CLASSES[plain]


def _inherits_forward(kind: type[nn.Module]) -> bool:
    return issubclass(kind, _BatchNorm) and kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _tracked(owner: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in owner._buffers.items() if buffer is not None and name != "pending"]


def _change(old: Tensor, new: Tensor | None) -> Tensor:
    assert new is not None
    return old ^ new if old.dtype == torch.bool else new.detach() - old


def _add_change(buffer: Tensor, change: Tensor) -> None:
    if buffer.dtype == torch.bool:
        buffer.logical_xor_(change.round())
    else:
        buffer.add_((change if buffer.is_floating_point() else change.round()).to(buffer.dtype))


def _blank(plain: type[nn.Module]) -> SplitLayer:
    kind = split_class(plain)
    return kind.__new__(kind)


def _fill_branches(layer: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Let a plain checkpoint load: branches that it lacks start as copies of main that were never trained."""
    assert isinstance(layer, SplitLayer) and isinstance(state, dict)
    for name in layer.branches[1:]:
        if any(key.startswith(f"{prefix}{name}.") for key in state):
            continue
        for key in layer.owner(name).state_dict():
            if f"{prefix}{key}" in state:
                value = state[f"{prefix}{key}"]
                copy = torch.zeros_like(value) if key == "num_batches_tracked" else value.clone()
                state[f"{prefix}{name}.{key}"] = copy


class _Mark(torch.autograd.Function):
    """The identity; its backward pass sets the branch that the images went through.

    Autograd runs the backward pass of a later forward pass before that of an earlier one, so the mark holds for all
    layers that activation checkpointing recomputes until the next mark.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, layers: list[SplitLayer], branch: str) -> Tensor:
        ctx.layers, ctx.branch = layers, branch
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _set_walked(ctx.layers, ctx.branch)
        # At the end of this backward pass: the next one may be of a loss without a mark.
        torch.autograd.Variable._execution_engine.queue_callback(partial(_set_walked, ctx.layers, None))
        return gradient, None, None


def _set_walked(layers: list[SplitLayer], branch: str | None) -> None:
    for layer in layers:
        layer.walked = branch


def marked(loss: Tensor, model: nn.Module, branch: str) -> Tensor:
    """Mark the loss of images that went through `branch`, for a backward pass outside of `route`."""
    layers = split_layers(model)
    return _Mark.apply(loss, layers, branch) if layers else loss
