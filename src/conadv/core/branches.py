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
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# When running statistics are updated: in each forward pass (as in BatchNorm), once at the end of a step, or never.
Tracking = Literal["now", "step", "off"]

_UNKNOWN_BRANCH = (
    "a split BatchNorm layer ran again (activation checkpointing) in a backward pass where its branch is not known: "
    "call method(batch) in place of method.loss(batch).backward(), or backward() within the `with route(...)` of the "
    "forward pass"
)
_CLASSES: dict[type[_BatchNorm], type[SplitLayer]] = {}


# It writes nothing, but a compiler would remove an operation without side effects.
@torch.library.custom_op("conadv::require_forward_pass", mutates_args=("pending",))
def _require_forward_pass(pending: Tensor) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(_UNKNOWN_BRANCH)


class Way(NamedTuple):
    """How images go through a layer at the moment."""

    branch: str = "main"
    batch_statistics: bool | None = None  # None: by the layer's training flag
    tracking: Tracking | Literal["again"] = "now"  # "again": recomputed, its statistics were counted before
    routed: bool = False  # False: the default, outside of `route`
    tally: Tally | None = None  # where statistics of the pass are collected, with tracking "step"


class SplitLayer(_BatchNorm):
    """A layer with further branches; which one an image goes through is set by `route`.

    A layer is converted in place, so that hooks and references stay. Outside of `route` it behaves as before, also for
    code that checks its class. It calls torch's kernel; a subclass of
    BatchNorm with a forward pass of its own runs that, with the tensors of a branch in place of its own.
    """

    plain: ClassVar[type[_BatchNorm]]
    """The class of the layer before the split."""
    kernel: ClassVar[bool]
    """Whether it has the forward pass of torch's BatchNorm."""
    way: Way
    branches: tuple[str, ...]
    ever_left_main: bool
    """Whether images went another way, whose backward pass may come later, outside of the route."""

    def grow(self, branches: Mapping[str, _BatchNorm]) -> None:
        """Add branches to a layer that was just converted."""
        self.way, self.branches, self.ever_left_main = Way(), ("main", *branches), False
        for name, branch in branches.items():
            self.add_module(name, branch)
        for owner in (self, *branches.values()):
            if found := averages(owner):
                size = sum(buffer.numel() for buffer in found)
                owner.register_buffer("pending", found[0].new_zeros(size + 1), persistent=False)
        self.register_load_state_dict_pre_hook(_fill_branches)

    def owner(self, branch: str) -> _BatchNorm:
        """The module that holds the weights and statistics of a branch."""
        if branch not in self.branches:
            raise ValueError(f"the model has no branch {branch!r}: split it with split_batchnorm(model, branches=...)")
        return self if branch == "main" else self._modules[branch]  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        branch, batch_statistics, tracking, _, tally = self._current_way()
        owner = self.owner(branch)
        training = self.training if batch_statistics is None else batch_statistics
        tracks = training and tracking != "off" and "pending" in owner._buffers
        if not self.kernel:
            return self._run_own(owner, training, tracking if tracks else "off", args, kwargs)
        self._check_input_dim(*args)
        mean, var = owner._buffers["running_mean"], owner._buffers["running_var"]
        if not tracks:
            if not training and mean is not None and var is not None:
                # Cloned, since DistributedDataParallel overwrites buffers between a forward pass and its backward.
                return _normalize(owner, mean.clone(), var.clone(), False, *args, **kwargs)
            return _normalize(owner, None, None, True, *args, **kwargs)
        assert mean is not None and var is not None
        # In a compiled graph or a replica of DataParallel, Python state of this pass would be lost.
        is_copy = torch.compiler.is_compiling() or "_is_replica" in vars(self)
        room = None if tally is None or is_copy else tally.room(owner)
        mean, var = (torch.zeros_like(mean), torch.zeros_like(var)) if room is None else room
        y = _normalize(owner, mean, var, True, *args, **kwargs)
        if room is None and tracking != "again":
            _count(self, owner, [mean, var], tracking)
        return y

    def _run_own(self, owner: _BatchNorm, training: bool, tracking: str, args: Any, kwargs: Any) -> Any:
        """Run the layer's own forward pass, on copies of the buffers; its changes to them count as statistics."""
        own, before = (self._parameters, self._buffers, self.training), averages(owner)
        lent = {name: None if buffer is None else buffer.clone() for name, buffer in owner._buffers.items()}
        try:
            self._parameters, self._buffers, self.training = owner._parameters, lent, training
            y = super().forward(*args, **kwargs)
        finally:
            self._parameters, self._buffers, self.training = own
        if tracking in ("now", "step"):
            # A forward pass may write into a buffer or replace it.
            after = (cast(Tensor, lent[name]) for name in ("running_mean", "running_var"))
            changes = [new - old for new, old in zip(after, before, strict=True)]
            _count(self, owner, [change.detach().flatten() for change in changes], tracking)
        return y

    def _current_way(self) -> Way:
        """The way of this pass. Activation checkpointing runs a layer again in the backward pass."""
        way = self.way
        if torch.compiler.is_compiling():  # whether this is a backward pass is known when the graph runs
            if self.ever_left_main and not way.routed and "pending" in self._buffers:
                _require_forward_pass(self.get_buffer("pending"))
            return way
        if torch._C._current_graph_task_id() == -1:
            return way
        if self.ever_left_main and not way.routed:
            raise RuntimeError(_UNKNOWN_BRANCH)
        return way if way.tracking == "off" else way._replace(tracking="again")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by the original class: the class of this layer has no name in a module."""
        return (_blank, (self.plain,), *super().__reduce_ex__(protocol)[2:])


def averages(owner: _BatchNorm) -> list[Tensor]:
    """The running statistics of a branch; empty if it has none."""
    mean, var = owner._buffers["running_mean"], owner._buffers["running_var"]
    return [] if mean is None or var is None else [mean, var]


def split_layers(model: nn.Module) -> list[SplitLayer]:
    return [module for module in model.modules() if isinstance(module, SplitLayer)]


def owners_of(model: nn.Module) -> dict[nn.Module, SplitLayer]:
    """The modules that hold the weights and statistics of branches, each with its layer."""
    return {layer.owner(name): layer for layer in split_layers(model) for name in layer.branches}


def split_class(plain: type[_BatchNorm]) -> type[SplitLayer]:
    """The class of split layers for a class of layers, the same each time."""
    own = {"plain": plain, "kernel": plain.forward is _BatchNorm.forward}
    return _CLASSES.setdefault(plain, type(f"Split{plain.__name__}", (SplitLayer, plain), own))


def _blank(plain: type[_BatchNorm]) -> SplitLayer:
    kind = split_class(plain)
    return kind.__new__(kind)


def _normalize(owner: _BatchNorm, mean: Tensor | None, var: Tensor | None, training: bool, input: Tensor) -> Tensor:
    """BatchNorm's kernel; with momentum 1, it writes the statistics of this batch into `mean` and `var`."""
    return F.batch_norm(input, mean, var, owner.weight, owner.bias, training, 1.0, owner.eps)


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


class Tally:
    """The BatchNorm statistics of one forward pass through some branches, in one tensor per device and dtype."""

    def __init__(self, owners: Iterable[_BatchNorm]) -> None:
        self._free: dict[_BatchNorm, Tensor] = {}
        self._used: list[tuple[Tensor, Tensor]] = []
        pending = {owner: owner.get_buffer("pending") for owner in owners if "pending" in owner._buffers}
        for kind in {(own.device, own.dtype) for own in pending.values()}:
            sizes = {owner: len(own) - 1 for owner, own in pending.items() if (own.device, own.dtype) == kind}
            flat = torch.zeros(sum(sizes.values()), device=kind[0], dtype=kind[1])
            self._free |= zip(sizes, flat.split(list(sizes.values())), strict=True)

    def room(self, owner: _BatchNorm) -> tuple[Tensor, Tensor] | None:
        """Zeros for the mean and variance of a branch; None if it runs again."""
        own = self._free.pop(owner, None)
        if own is None:
            return None
        self._used.append((owner.get_buffer("pending"), own))
        mean, var = own.chunk(2)
        return mean, var

    @torch.no_grad()
    def add(self) -> None:
        """Add the statistics of the pass to the pending ones."""
        if self._used:
            pending, own = zip(*self._used, strict=True)
            torch._foreach_add_([one[:-1] for one in pending], list(own))
            torch._foreach_add_([one[-1] for one in pending], 1)


def _count(layer: SplitLayer, owner: _BatchNorm, statistics: list[Tensor], tracking: str) -> None:
    """Add the statistics of one forward pass to the pending ones: their sums and, last, the number of passes."""
    pending = owner.get_buffer("pending")
    pending.add_(torch.cat([*statistics, pending.new_ones(1)]))
    if tracking == "now":
        update_averages([(owner, layer)])


@torch.no_grad()
def update_averages(branches: Iterable[tuple[nn.Module, SplitLayer]]) -> None:
    """Update running statistics with the mean over the pending passes, without waiting for the device.

    Branches of one kind are updated at once: those of torch's kernel with statistics, others with their own changes.
    """
    groups: defaultdict[Any, list[_BatchNorm]] = defaultdict(list)
    for owner, layer in branches:
        if "pending" in owner._buffers:
            pending, branch = owner.get_buffer("pending"), cast(_BatchNorm, owner)
            groups[pending.device, pending.dtype, layer.kernel, branch.momentum].append(branch)
    for (_, _, kernel, momentum), group in groups.items():
        pendings = [owner.get_buffer("pending") for owner in group]
        running = [buffer.view(-1) for owner in group for buffer in averages(owner)]
        batches = [owner.get_buffer("num_batches_tracked") for owner in group]
        passes = torch.stack([own[-1] for own in pendings])
        seen = passes > 0
        moved_batches = torch.stack(batches).add_(seen)
        torch._foreach_copy_(batches, list(moved_batches.unbind()))
        if kernel and momentum is None:  # the mean over all steps
            share = 1 / moved_batches.clamp(min=1).to(passes.dtype)
        else:
            share = torch.full_like(passes, momentum if kernel else 1.0)
        columns = torch.stack([share * seen, passes.clamp(min=1)]).split(1, dim=1)
        wide = [column.expand(-1, len(own) - 1) for column, own in zip(columns, pendings, strict=True)]
        weight, divisor = torch.cat(wide, dim=1)
        before, mean = torch.cat(running), torch.cat([own[:-1] for own in pendings]) / divisor
        moved = before.lerp_(mean, weight) if kernel else before.add_(mean)
        torch._foreach_copy_(running, list(moved.split([len(buffer) for buffer in running])))
        torch._foreach_zero_(pendings)
