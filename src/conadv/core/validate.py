"""Mistakes that would silently train wrongly: refused when a method is made, or in its first steps.

made          arguments, layers without branches, a loss that says that it is no mean
first steps   a loss that is no mean, the range of the images, other layers that track statistics, settings of all ranks
first updates the optimizer has the weights of this model, and of all of its branches
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss, _WeightedLoss
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from conadv.peers import COMPARED, check_ranks
from conadv.wrappers import innermost, trainable

from .attack import Attack, Loss
from .branches import owners_of, split_layers
from .pgd import PGD

# Calls in which the losses of chunks are compared, which waits for the device.
_COMPARED_CALLS = 16
# Calls in which an optimizer should have taken its first step, also with gradient accumulation.
_WATCHED_CALLS = 64


def check_arguments(model: Any, loss: Any, chunk_size: int | None, twin_branch: str | None) -> None:
    """Refuse arguments of a method that cannot be what they are passed for."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: take at least 1 image, or None for the whole batch")
    if not isinstance(model, nn.Module) or isinstance(loss, Attack):
        given = f"({type(model).__name__}, {type(loss).__name__}, ...)"
        raise ValueError(f"a method takes (model, loss, attack) in this order, not {given}")
    if isinstance(loss, type):
        raise ValueError(f"the loss {loss.__name__} is a class: pass one of its objects, {loss.__name__}()")
    if next(model.parameters(), None) is None:
        raise ValueError("a model without parameters has nothing to learn")
    if twin_branch not in (None, "adv", "main"):
        raise ValueError(f'twin_branch {twin_branch!r}: take "adv" or "main"')
    if isinstance(loss, _Loss) and loss.reduction != "mean":
        raise ValueError(f'the loss has reduction="{loss.reduction}": a method needs the mean, reduction="mean"')
    if chunk_size is not None and isinstance(loss, _WeightedLoss) and loss.weight is not None:
        raise ValueError(
            "a loss with class weights is not the mean of its chunks: pass chunk_size=None, "
            "or multiply per-image losses by their weights and take the plain mean"
        )


def check_keywords(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that a method would not read."""
    if found := given.keys() & {"delay", "twins"}:
        raise ValueError(f"{min(found)}= is for ConAdv: Recycled, Sam and Vanilla have no delay, and cannot use a pool")
    if unknown := given.keys() - known.keys():
        if min(unknown) in {field.name for field in fields(PGD)}:
            raise TypeError(f"{min(unknown)} belongs to the attack: conadv.PGD({min(unknown)}=...)")
        raise TypeError(f"unknown argument {min(unknown)!r}: a method also takes {', '.join(known)}")


def check_branches(model: nn.Module, branches: Sequence[str]) -> None:
    """Refuse a model that would silently mix the statistics of clean and adversarial images."""
    which = "" if tuple(branches) == ("main", "adv") else f", branches={branches}"
    call = f"conadv.split_batchnorm(model{which}) before making the optimizer and the method"
    split = owners_of(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module not in split:
            raise ValueError(f"layer {name} is a plain BatchNorm layer: call {call}")
    for layer in split_layers(model):
        if not set(branches) <= set(layer.branches):
            raise ValueError(f"the model has only the branches {', '.join(layer.branches)}: call {call}")


def described(attack: Any) -> dict[str, Any]:
    """The settings of an attack that have to be the same on all ranks: its type and, of a dataclass, its fields."""
    own = fields(attack) if is_dataclass(attack) else ()
    return {"attack": type(attack).__name__, **{field.name: getattr(attack, field.name) for field in own}}


class Checks:
    """What a method looks at in its steps; what would wait for the device is looked at once or a few times.

    `branches` are those that the method trains; empty: the model need not be split.
    """

    def __init__(self, model: nn.Module, loss: Loss, chunk_size: int | None, branches: tuple[str, ...]) -> None:
        self._model, self._loss, self._chunk_size, self._branches = model, loss, chunk_size, branches
        self.own_loop = (
            True  # False: the ranks of a layout check theirs themselves, or ranks were told that weights differ
        )
        self._calls = 0
        self._seen_images = self._seen_labels = self._seen_loss = self._seen_eval = False
        self._updates: Updates | None = Updates(model, "adv" in branches)
        if branches:
            check_branches(model, branches)

    def begin(self, settings: Callable[[], Mapping[str, Any]], delayed: bool) -> None:
        """Check the surroundings of a call, and in the first ones that `settings` are the same on all ranks.

        `delayed`: each call counts as a step, because it leaves weights or twins for a later one.
        """
        if not torch.is_grad_enabled():
            raise ValueError(
                "a method takes training steps, and gradients are off here (torch.no_grad, inference_mode): "
                "to evaluate, call the model itself"
            )
        if not self._seen_eval and not innermost(self._model).training:
            self._seen_eval = True
            warnings.warn(
                "a training step with the model in eval mode: BatchNorm and dropout work as in an evaluation; call "
                "model.train() after each evaluation (to freeze some layers, put only those into eval mode)",
                stacklevel=5,
            )
        if self._calls == 0 and self._branches:
            check_branches(self._model, self._branches)  # layers may have been replaced since the method was created
        if self._updates is not None and not self._updates.check(self._calls, delayed):
            self._updates.hook.remove()
            self._updates = None
        if self.own_loop and self._calls in COMPARED:
            self.own_loop = check_ranks(self._model, self._calls, settings, self._chunk_size)
        self._calls += 1

    def look_at_images(self, attack: Attack, images: Tensor) -> None:
        """Check that the first images are in the range of the attack."""
        if not self._seen_images:
            attack.check_range(images)
            self._seen_images = True

    def look_at_labels(self, labels: Any) -> None:
        """Refuse labels that a loss ignores: each chunk would be divided by another number of images."""
        if self._chunk_size is None or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        if self._seen_labels and labels.device.type != "cpu":  # looking again would wait for the device
            return
        self._seen_labels = True
        if bool(((labels < 0) | (labels == getattr(self._loss, "ignore_index", -1))).any()):
            raise ValueError(
                "labels that the loss ignores (below 0, or ignore_index) with chunks: each chunk would be averaged "
                "over another number of images; pass chunk_size=None, or drop these images"
            )

    def look_at_loss(self, loss: Any, outputs: Any, labels: Any, images: Tensor, chunks: int) -> None:
        """Check that the loss is a mean over the images, also if the batch is cut into several chunks."""
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f'the loss returns {shape}, not one number: use reduction="mean"')
        if not self._seen_loss and self.own_loop and not bool(loss.isfinite()) and not bool(images.isfinite().all()):
            raise ValueError(
                f"the images have NaN or infinity, so the loss is {loss.item()}: look at how they are made (a "
                "division by 0 in the normalization?)"
            )
        if not self._seen_loss or (chunks > 1 and self._calls <= _COMPARED_CALLS):
            check_mean(self._loss, loss, outputs, labels, len(images), chunks > 1)
        self._seen_loss = True


class Updates:
    """Check, at the first updates, that an optimizer has the weights of this model and of all of its branches.

    A hook notes whose parameters each `optimizer.step()` updates, until the first one that is right.
    """

    def __init__(self, model: nn.Module, has_adv: bool) -> None:
        self._model, self._has_adv = model, has_adv
        self._updated: set[int] = set()  # ids of the parameters of all optimizers that took a step
        self._copies = 0  # steps of optimizers with parameters like those of the model, but others and no gradients
        self._uses_lbfgs = False
        # A method that is dropped before its first update leaves a hook that does nothing: PyTorch may be iterating.
        self.hook = register_optimizer_step_pre_hook(partial(_note, ref(self)))

    def check(self, calls: int, delayed: bool) -> bool:
        """Check what happened before call number `calls`; return whether there is more to look at."""
        if delayed and self._uses_lbfgs:
            raise ValueError(
                "LBFGS evaluates its closure several times per step, and each would count as a step of this method: "
                "use ConAdv(delay=0), or another optimizer"
            )
        if self._updated.isdisjoint(map(id, trainable(self._model))):
            if self._copies > 1:
                raise ValueError(
                    "the optimizer has the weights of a copy of the method's model, which never learns: make the "
                    "method and the optimizer with the same model (a deepcopy has other weights)"
                )
            return calls < _WATCHED_CALLS
        missing = False
        for layer in split_layers(self._model) if self._has_adv else ():
            main, adv = (next(layer.owner(name).parameters(recurse=False), None) for name in ("main", "adv"))
            if main is not None and adv is not None and adv.requires_grad:
                missing |= id(main) in self._updated and id(adv) not in self._updated
        if missing and calls > 1:
            raise ValueError("the adv branch is never updated: make the optimizer after split_batchnorm")
        return missing

    def note(self, optimizer: Optimizer) -> None:
        """Note whose parameters an optimizer is about to update."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        own = trainable(self._model)
        self._updated |= {id(weight) for weight in weights}
        if not {id(weight) for weight in own}.isdisjoint(map(id, weights)):
            self._uses_lbfgs |= isinstance(optimizer, torch.optim.LBFGS)
        elif all(weight.grad is None for weight in weights):
            self._copies += Counter(weight.shape for weight in own) == Counter(weight.shape for weight in weights)


def _note(updates: ref[Updates], optimizer: Optimizer, *_: Any) -> None:
    own = updates()
    if own is not None and not torch.compiler.is_compiling():
        own.note(optimizer)


@torch.no_grad()
def check_mean(loss_of: Loss, loss: Tensor, outputs: Any, labels: Any, count: int, chunked: bool) -> None:
    """Compare the loss of `count` images with that of the images given twice and, with chunks, of their two halves.

    Outputs and labels may be tensors, or structures and objects that hold tensors; those that the loss cannot be
    computed with are not checked.
    """

    def again(images: slice | list[int]) -> Tensor | None:
        try:
            return loss_of(_picked(outputs, images, count), _picked(labels, images, count))
        except Exception:  # anything that a user's loss may raise for inputs that it does not expect
            return None

    twice = again([*range(count), *range(count)])
    if twice is not None and not close(twice, loss, outputs):
        raise ValueError(
            f"the loss of images given twice is {float(twice):.4g}, not {float(loss):.4g} as once: "
            'a method needs the mean over the images, reduction="mean"'
        )
    half = count // 2
    if not chunked or half == 0:
        return
    first, second = again(slice(half)), again(slice(half, count))
    if first is None or second is None:
        return
    mean = (first * half + second * (count - half)) / count
    undefined = bool(loss.isfinite()) and not bool(mean.isfinite())  # a half of which all labels are ignored
    if undefined or not close(mean, loss, outputs):
        raise ValueError(
            "the loss of two chunks is not the mean of their losses (class weights, or ignored labels?): "
            "pass chunk_size=None"
        )


def _picked(values: Any, images: slice | list[int], count: int) -> Any:
    """Some of the images in a structure with values for `count` images; other values are kept."""

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[images] if value.dim() > 0 and len(value) == count else value
        held = {name: own for name, own in getattr(value, "__dict__", {}).items() if isinstance(own, Tensor)}
        if not held:
            return value
        other = copy.copy(value)
        vars(other).update({name: pick(own) for name, own in held.items()})
        return other

    return tree_map(pick, values)


def close(left: Tensor, right: Tensor, outputs: Any) -> bool:
    """Whether two losses are equal up to the rounding of outputs of this precision."""
    if not bool(left.isfinite() & right.isfinite()):
        return True  # a loss that is not finite is noticed elsewhere
    kinds = [leaf.dtype for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    rounding = 16 * torch.finfo(max([*kinds, right.dtype], key=lambda kind: torch.finfo(kind).eps)).eps ** 0.75
    return bool(torch.isclose(left.double(), right.double(), rtol=rounding, atol=rounding))


@contextmanager
def no_mixed_statistics(model: nn.Module) -> Iterator[None]:
    """Refuse a forward pass, within this context, that changes a floating-point buffer which no branch owns.

    Constant buffers (masks, position tables, frozen statistics), counters and the vectors of spectral norm, which
    follow from the weights alone, are not statistics of images.
    """
    owners = owners_of(model)
    before = []
    for name, module in model.named_modules():
        for key, buffer in () if _is_spectral(module) else module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and not (module in owners and key == "pending"):
                before.append((name, module, key, buffer.clone()))
    yield
    for name, module, key, old in before:
        new = module._buffers.get(key)
        # One of another shape is a table that was built again, not a moving average.
        if new is not None and new.shape == old.shape and not torch.allclose(new, old, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) tracks statistics of images in its buffer {key}, "
                "which clean and adversarial images would share: replace it by a layer without such a buffer, or by "
                "BatchNorm"
            )


def _is_spectral(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
