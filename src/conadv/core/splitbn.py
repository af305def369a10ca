"""BatchNorm with a branch for each kind of image: convert a model, route images, get the plain model back.

images ──► main ─┐                    Each branch has its own statistics, weight and bias.
twins  ──► adv  ─┴─► normalized       Main keeps BatchNorm's own keys, the others live below their name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as synchronized_batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

Statistics = Literal["batch", "running"]
# When running statistics move: with each forward pass (as BatchNorm's do), once at the end of a step, or not at all.
Tracking = Literal["now", "step", "off"]

_KNOWN_BRANCHES = (("main",), ("main", "adv"), ("main", "aug"), ("main", "aug", "adv"))
_Module = TypeVar("_Module", bound=nn.Module)


class _Way(NamedTuple):
    """How images go through a layer at the moment."""

    branch: str = "main"
    batch_statistics: bool | None = None  # None: as the train/eval flag says
    tracking: Tracking = "now"


class SplitBatchNorm(_BatchNorm):
    """A BatchNorm layer with further branches; which one an image goes through is set by `route`.

    `split_batchnorm` makes it of a layer in place, so that hooks and references stay. Outside of `route` it is the
    layer that it was, also to code that looks for `nn.BatchNorm2d`.
    """

    way: _Way | None  # None: closed, while a backward pass runs

    def grow(self, branches: Mapping[str, _BatchNorm]) -> None:
        """Add branches to a layer that was a plain one until now."""
        self.way = _Way()
        for name, branch in branches.items():
            self.add_module(name, branch)
        for owner in self.owners().values():
            if owner.running_mean is not None:
                # Sums of means and variances, and the number of forward passes they come from.
                pending = owner.running_mean.new_zeros(2 * self.num_features + 1)
                owner.register_buffer("pending", pending, persistent=False)
        self.register_load_state_dict_pre_hook(_fill_branches)

    def owners(self) -> dict[str, _BatchNorm]:
        """The module that holds the weights and statistics of each branch."""
        branches = {name: child for name, child in self.named_children() if isinstance(child, _BatchNorm)}
        return {"main": self, **branches}

    def forward(self, x: Tensor) -> Tensor:
        if self.way is None:
            raise RuntimeError(
                "a split BatchNorm layer ran again in the backward pass, when its branch is no longer known: "
                "leave BatchNorm layers out of activation checkpointing"
            )
        self._check_input_dim(x)
        branch, batch_statistics, tracking = self.way
        owner = self if branch == "main" else self.get_submodule(branch)
        assert isinstance(owner, _BatchNorm)
        if owner.running_mean is None or owner.running_var is None:
            return self._normalize(x, owner, None, None)
        if not (self.training if batch_statistics is None else batch_statistics):
            # Cloned, since DistributedDataParallel overwrites buffers between two forward passes and their backward.
            mean, var = owner.running_mean.clone(), owner.running_var.clone()
            return F.batch_norm(x, mean, var, owner.weight, owner.bias, False, 0.0, owner.eps)
        if tracking == "off":
            return self._normalize(x, owner, None, None)
        # With momentum 1 the kernel writes the statistics of this batch into the buffers that it is given.
        mean, var = torch.zeros_like(owner.running_mean), torch.zeros_like(owner.running_var)
        y = self._normalize(x, owner, mean, var)
        assert isinstance(owner.pending, Tensor)
        owner.pending.add_(torch.cat([mean, var, mean.new_ones(1)]))
        if tracking == "now":
            _update_stats(owner)
        return y

    def _normalize(self, x: Tensor, owner: _BatchNorm, mean: Tensor | None, var: Tensor | None) -> Tensor:
        if isinstance(self, nn.SyncBatchNorm) and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
            ranks = dist.get_world_size(group)
            if ranks > 1:
                if x.device.type == "cpu":
                    raise ValueError("SyncBatchNorm has no CPU kernel: use BatchNorm1d, 2d or 3d there")
                arguments = (x, owner.weight, owner.bias, mean, var, owner.eps, 1.0, group, ranks)
                return synchronized_batch_norm.apply(*arguments)  # type: ignore[no-any-return]
        return F.batch_norm(x, mean, var, owner.weight, owner.bias, True, 1.0, owner.eps)


class SplitBatchNorm1d(SplitBatchNorm, nn.BatchNorm1d):
    pass


class SplitBatchNorm2d(SplitBatchNorm, nn.BatchNorm2d):
    pass


class SplitBatchNorm3d(SplitBatchNorm, nn.BatchNorm3d):
    pass


class SplitSyncBatchNorm(SplitBatchNorm, nn.SyncBatchNorm):
    pass


_SPLIT: dict[type[nn.Module], type[SplitBatchNorm]] = {
    nn.BatchNorm1d: SplitBatchNorm1d,
    nn.BatchNorm2d: SplitBatchNorm2d,
    nn.BatchNorm3d: SplitBatchNorm3d,
    nn.SyncBatchNorm: SplitSyncBatchNorm,
}


def split_batchnorm(model: _Module, branches: Sequence[str] = ("main", "adv")) -> _Module:
    """Give every BatchNorm layer of a model further branches, in place, and return the model.

    Call it before the optimizer is made (the branches have weights of their own). The branches start as copies of
    the layer. `("main",)` adds none, but lets statistics move once a step; `("main", "aug", "adv")` adds two.
    """
    if tuple(branches) not in _KNOWN_BRANCHES:
        known = " or ".join(map(str, _KNOWN_BRANCHES))
        raise ValueError(f"branches {tuple(branches)}: take {known}")
    if split_layers(model):
        raise ValueError("this model is split already: call split_batchnorm once, on the plain model")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("DistributedDataParallel would not exchange the new branches: split the model, then wrap it")
    for layer in [module for module in model.modules() if is_batchnorm(module)]:
        copies = {name: _untrained_copy(layer) for name in branches[1:]}
        layer.__class__ = _SPLIT[type(layer)]
        assert isinstance(layer, SplitBatchNorm)
        layer.grow(copies)
    return model


def is_batchnorm(module: nn.Module) -> bool:
    """Whether a module is a plain BatchNorm layer; a subclass that nobody here knows is an error, not a guess."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SplitBatchNorm) and type(module) not in _SPLIT:
        raise ValueError(f"cannot split {type(module).__name__}: use BatchNorm1d, 2d, 3d or SyncBatchNorm itself")
    return type(module) in _SPLIT


def split_layers(model: nn.Module) -> list[SplitBatchNorm]:
    return [module for module in model.modules() if isinstance(module, SplitBatchNorm)]


def plain_layers(model: nn.Module) -> list[str]:
    """The names of BatchNorm layers that were not split."""
    branches = {owner for layer in split_layers(model) for owner in layer.children()}
    return [name for name, module in model.named_modules() if module not in branches and is_batchnorm(module)]


@contextmanager
def route(
    model: nn.Module,
    branch: str = "main",
    *,
    statistics: Statistics | None = None,
    tracking: Tracking = "now",
) -> Iterator[None]:
    """Within, images go through `branch` of every split layer.

    statistics: of the batch or the running ones; None: as the train/eval flag says. A layer that is frozen
    (in eval mode within a model in training mode) keeps to its running statistics.
    """
    model = unwrap(model)
    layers = split_layers(model)
    ways = [_Way(branch, _uses_batch(layer, model, statistics), tracking) for layer in layers]
    for layer, way in zip(layers, ways, strict=True):
        _check_branch(layer, way, frozen=model.training and not layer.training)
    with _set_ways(layers, ways):
        yield


@contextmanager
def closed(model: nn.Module) -> Iterator[None]:
    """Within, a split layer refuses images: a backward pass may cover several branches, and cannot recompute them."""
    layers = split_layers(model)
    with _set_ways(layers, [None] * len(layers)):
        yield


def update_running_stats(model: nn.Module) -> None:
    """End a step: running statistics move once, with the mean over the forward passes tracked by "step"."""
    for layer in split_layers(model):
        for owner in layer.owners().values():
            if owner.running_mean is not None:
                _update_stats(owner)


def pending_statistics(model: nn.Module) -> list[Tensor]:
    """What `update_running_stats` will use: sums over forward passes, which can be added up over processes."""
    owners = [owner for layer in split_layers(model) for owner in layer.owners().values()]
    return [owner.get_buffer("pending") for owner in owners if owner.running_mean is not None]


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model as it was before the split: the main branch, under BatchNorm's own keys."""
    model = unwrap(model)
    model = model._modules.get("_orig_mod") or model  # what torch.compile wraps has the keys of before
    branches = tuple(
        f"{name}.{branch}." if name else f"{branch}."
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SplitBatchNorm)
        for branch in list(layer.owners())[1:]
    )
    return {key: value for key, value in model.state_dict().items() if not key.startswith(branches)}


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, which exchanges gradients only when called through its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _update_stats(owner: _BatchNorm) -> None:
    """Move one branch's statistics by what is pending. Only tensor arithmetic: nothing waits for the device."""
    pending, running_mean, running_var = owner.pending, owner.running_mean, owner.running_var
    tracked = owner.num_batches_tracked
    assert isinstance(pending, Tensor) and running_mean is not None and running_var is not None and tracked is not None
    passes = pending[-1]
    seen = passes > 0
    mean, var = (pending[:-1] / passes.clamp(min=1)).chunk(2)
    tracked.add_(seen)
    momentum = 1 / tracked.clamp(min=1).to(pending.dtype) if owner.momentum is None else owner.momentum
    share = seen.to(pending.dtype) * momentum
    running_mean.lerp_(mean, share)
    running_var.lerp_(var, share)
    pending.zero_()


@contextmanager
def _set_ways(layers: Sequence[SplitBatchNorm], ways: Sequence[_Way | None]) -> Iterator[None]:
    before = [layer.way for layer in layers]
    try:
        for layer, way in zip(layers, ways, strict=True):
            layer.way = way
        yield
    finally:
        for layer, way in zip(layers, before, strict=True):
            layer.way = way


def _uses_batch(layer: SplitBatchNorm, model: nn.Module, statistics: Statistics | None) -> bool | None:
    if statistics is None:
        return None
    frozen = model.training and not layer.training
    return statistics == "batch" and not frozen


def _check_branch(layer: SplitBatchNorm, way: _Way, frozen: bool) -> None:
    if way.branch == "main":
        return
    owner = layer.owners().get(way.branch)
    if owner is None:
        raise ValueError(f"the model has no branch {way.branch!r}: split it with split_batchnorm(model, branches=...)")
    evaluated = not (layer.training if way.batch_statistics is None else way.batch_statistics)
    if evaluated and not frozen and owner.num_batches_tracked is not None and owner.num_batches_tracked == 0:
        raise ValueError(
            f"the {way.branch} branch was never trained, so it has no statistics to evaluate with: train it first"
        )


def _untrained_copy(layer: nn.Module) -> _BatchNorm:
    """What holds a branch: a layer with copies of the tensors, but none of the hooks."""
    assert isinstance(layer, _BatchNorm)
    branch = type(layer)(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    for name, parameter in layer._parameters.items():
        copied = None if parameter is None else nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        branch.register_parameter(name, copied)
    for name, buffer in layer._buffers.items():
        branch.register_buffer(name, None if buffer is None else buffer.clone())
    if branch.num_batches_tracked is not None:
        branch.num_batches_tracked.zero_()
    return branch.train(layer.training)


def _fill_branches(layer: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Let a plain checkpoint load: branches that it does not have start as copies of main, never trained."""
    assert isinstance(layer, SplitBatchNorm) and isinstance(state, dict)
    for name in list(layer.owners())[1:]:
        if any(key.startswith(f"{prefix}{name}.") for key in state):
            continue
        for key in layer.get_submodule(name).state_dict():
            if f"{prefix}{key}" in state:
                value = state[f"{prefix}{key}"]
                state[f"{prefix}{name}.{key}"] = torch.zeros_like(value) if key == "num_batches_tracked" else value
