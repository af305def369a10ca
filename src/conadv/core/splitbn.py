"""BatchNorm with a branch for each kind of image: convert a model, route images, get the plain model back.

images ──► main ─┐                    Each branch has its own statistics, weight and bias.
twins  ──► adv  ─┴─► normalized       Main keeps BatchNorm's own keys, the keys of the others start with their name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from conadv.wrappers import innermost, is_exchanged, whole

from .branches import SplitLayer, Tally, Tracking, Way, averages, owners_of, split_class, split_layers, update_averages

Statistics = Literal["batch", "running"]

_KNOWN_BRANCHES = (("main",), ("main", "adv"), ("main", "aug"), ("main", "aug", "adv"))
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm)
_Module = TypeVar("_Module", bound=nn.Module)


def split_batchnorm(model: _Module, branches: Sequence[str] = ("main", "adv")) -> _Module:
    """Give every BatchNorm layer of a model further branches, in place, and return the model.

    Call it before the optimizer is made (the branches have weights of their own) and before the model is wrapped. The
    branches start as copies of the layer. BatchNorm layers are those of torch and every subclass, such as timm's
    `BatchNormAct2d`; a subclass with a forward pass of its own runs it on the tensors of the branch.

    Args:
        model: The model, whose BatchNorm layers are converted.
        branches: `("main", "adv")` adds a branch for adversarial images, `("main", "aug", "adv")` another one for an
            augmented view, `("main", "aug")` only that one, and `("main",)` none. A method updates the running
            statistics of all of them once per step.

    Raises:
        ValueError: A layer cannot be split, or the model is split or wrapped already. Nothing was changed.
    """
    if tuple(branches) not in _KNOWN_BRANCHES:
        known = " or ".join(map(str, _KNOWN_BRANCHES))
        raise ValueError(f"branches {tuple(branches)}: take {known}")
    if split_layers(model):
        raise ValueError("this model is split already: call split_batchnorm once, on the plain model")
    if is_exchanged(model):
        raise ValueError(
            "DistributedDataParallel or FSDP would not exchange the new branches: split the model, then wrap it"
        )
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for name, layer in found.items():
        if reason := _why_not(layer, branches):
            raise ValueError(f"cannot split {name or 'the model'} ({type(layer).__name__}): {reason}")
    statistics = [buffer for layer in found.values() for buffer in averages(layer)]
    if len({id(buffer) for buffer in statistics}) < len(statistics):
        raise ValueError("two BatchNorm layers share a running statistic: give each its own")
    copies: dict[str, dict[int, nn.Parameter]] = {name: {} for name in branches[1:]}
    for layer in found.values():
        grown = {name: _new_branch(layer, copies[name]) for name in branches[1:]}
        layer.__class__ = split_class(type(layer))
        assert isinstance(layer, SplitLayer)
        layer.grow(grown)
    return model


@contextmanager
def route(
    model: nn.Module,
    branch: str = "main",
    *,
    statistics: Statistics | None = None,
    tracking: Tracking = "now",
) -> Iterator[None]:
    """Route images through `branch` of every split layer, within this context.

    With activation checkpointing, call `backward()` within it too: layers are then recomputed in the same branch, and
    their statistics are counted once. (A layer that is compiled by itself inside a checkpointed block cannot tell that
    it is recomputed: "now" then updates its statistics twice, as for torch's own layers, and "step" only once.)

    Args:
        model: A model that was split, also inside wrappers; a model without split layers is not affected.
        branch: `"main"`, `"adv"` or `"aug"`.
        statistics: Those of the `"batch"` or the `"running"` ones; None: by the layer's training flag. A frozen layer
            (in eval mode within a model in training mode) always uses its running statistics.
        tracking: When running statistics are updated: `"now"`, in each forward pass, as in BatchNorm; `"step"`, once,
            by `update_running_stats`; or `"off"`, never.

    Raises:
        ValueError: The model has no such branch, or evaluates one that was never trained.
    """
    model = innermost(model)
    layers = split_layers(model)
    tally = Tally([layer.owner(branch) for layer in layers if layer.kernel]) if tracking == "step" else None
    before = [layer.way for layer in layers]
    leaves_main = (branch != "main" or tracking == "off") and (model.training or torch.is_grad_enabled())
    try:
        for layer in layers:
            layer.ever_left_main |= leaves_main
            uses_batch = _uses_batch(layer, branch, statistics, model.training)
            layer.way = Way(branch, uses_batch, tracking, True, tally)
        yield
    finally:
        for layer, way in zip(layers, before, strict=True):
            layer.way = way
    if tally is not None:
        tally.add()


def update_running_stats(model: nn.Module) -> None:
    """End a step: update running statistics once, with the mean over its forward passes with tracking "step"."""
    update_averages(owners_of(model).items())


def pending_statistics(model: nn.Module) -> list[Tensor]:
    """The sums over forward passes that `update_running_stats` will use; they can be added up over processes."""
    return [owner.get_buffer("pending") for owner in owners_of(model) if "pending" in owner._buffers]


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model as it was before the split: the main branch, under the layers' own keys.

    Args:
        model: The split model, also inside torch.compile, DistributedDataParallel, DataParallel, AveragedModel or
            Fabric, nested in any order. Where FSDP2 has sharded it, every rank must call this.

    Returns:
        What the plain model's `state_dict()` would be, with its metadata; it loads strictly in the plain model.
    """
    model = innermost(model)
    further = owners_of(model).keys() - set(split_layers(model))
    branches = tuple(name for name, module in model.named_modules(remove_duplicate=False) if module in further)
    below = tuple(f"{branch}." for branch in branches)
    state = model.state_dict()
    plain = OrderedDict((key, whole(value)) for key, value in state.items() if not key.startswith(below))
    metadata = state._metadata  # type: ignore[attr-defined]  # versions of modules, which some read when they load
    kept = {name: entry for name, entry in metadata.items() if name not in branches}
    plain._metadata = OrderedDict(kept)  # type: ignore[attr-defined]
    return plain


def _why_not(layer: _BatchNorm, branches: Sequence[str]) -> str | None:
    if isinstance(layer, LazyModuleMixin):
        return "its size is not known yet; run one batch through the model first"
    if "forward" in vars(layer):
        return "its forward method was replaced on the instance; replace it in a subclass instead"
    if is_parametrized(layer):
        return "it is parametrized; remove the parametrization first"
    if others := layer._buffers.keys() - {"running_mean", "running_var", "num_batches_tracked"}:
        return f"its buffer {min(others)!r} is none that BatchNorm has; keep it in a child"
    taken = [name for name in (*branches[1:], "pending") if hasattr(layer, name)]
    return f"it has an attribute {taken[0]!r} already, which names a branch; rename it" if taken else None


def _uses_batch(layer: SplitLayer, branch: str, statistics: Statistics | None, in_training: bool) -> bool | None:
    """Whether a layer normalizes with the statistics of the batch (None: by its training flag), if it may."""
    frozen = in_training and not layer.training
    uses_batch = None if statistics is None else statistics == "batch" and not frozen
    if branch == "main":
        return uses_batch
    evaluated = not (layer.training if uses_batch is None else uses_batch)
    batches = layer.owner(branch)._buffers.get("num_batches_tracked")
    if evaluated and not in_training and batches is not None and batches == 0:
        raise ValueError(
            f"the {branch} branch was never trained, so it has no running statistics: "
            "call model.train() before a training step, or train it before you evaluate it"
        )
    return uses_batch


def _new_branch(layer: _BatchNorm, copies: dict[int, nn.Parameter]) -> _BatchNorm:
    """Make a plain BatchNorm that holds a branch: copies of the layer's own tensors, but none of its hooks or children.

    `copies` has those of earlier layers by id, so that a weight that two layers share is shared in the branch too.
    """
    kind = next(kind for kind in _KINDS if isinstance(layer, kind))
    branch = kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    for name, parameter in layer._parameters.items():
        if parameter is not None and id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            vars(copies[id(parameter)]).update(vars(parameter))  # such as a mark for the optimizer
        branch.register_parameter(name, None if parameter is None else copies[id(parameter)])
    for name, buffer in layer._buffers.items():
        persistent = name not in layer._non_persistent_buffers_set
        branch.register_buffer(name, None if buffer is None else buffer.detach().clone(), persistent)
    if branch.num_batches_tracked is not None:
        branch.num_batches_tracked.zero_()
    return branch.train(layer.training)
