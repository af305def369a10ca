"""Warns of a method that is never called, although an optimizer trains its model.

method created ──► optimizer.step() counts ──► 16 updates of its parameters, and no call of a method: warn
                                          └──► a call of any method of this model: no longer count
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

# Updates of a model after which its method should have been called.
_UPDATES = 16


class Owner(Protocol):
    """What holds the model of a method."""

    model: nn.Module


# The owners whose methods were not called yet, and the steps of each optimizer since they were created.
_waiting: WeakKeyDictionary[Owner, WeakKeyDictionary[Optimizer, int]] = WeakKeyDictionary()
_handle: RemovableHandle | None = None


def expect_call(owner: Owner) -> None:
    """Warn, once, if the model of `owner` is trained and no method of it is called."""
    global _handle
    _waiting[owner] = WeakKeyDictionary()
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_count)


def note_call(model: nn.Module) -> None:
    """Stop waiting for a call of any method of `model`, also of one that was given it in another wrapper."""
    if _waiting:
        _forget(model)
        _remove_hook()


def _forget(model: nn.Module) -> None:
    first = next(model.parameters())
    for owner in list(_waiting):
        if next(owner.model.parameters(), None) is first:
            del _waiting[owner]


def _remove_hook() -> None:
    global _handle
    if _handle is not None and not _waiting:
        _handle.remove()
        _handle = None


def _count(optimizer: Optimizer, *_: Any) -> None:
    """Count a step that an optimizer is about to take. Parameters are compared once, when the count is reached."""
    if torch.compiler.is_compiling():  # a compiled step would be compiled again for every count
        return
    is_due = False
    for owner, steps in list(_waiting.items()):
        steps[optimizer] = steps.get(optimizer, 0) + 1
        if steps[optimizer] == _UPDATES + 1 and _trains(optimizer, owner.model):
            is_due = True
            _forget(owner.model)
    if is_due or not _waiting:
        # PyTorch iterates over the hooks of all optimizers now, so none of them can be removed. Those of this
        # optimizer come next, and a hook may remove itself if it is the last one.
        handle = optimizer.register_step_pre_hook(lambda *_: _end(handle, is_due))


def _end(handle: RemovableHandle, is_due: bool) -> None:
    handle.remove()
    _remove_hook()
    if is_due:
        warnings.warn(
            f"{_UPDATES} updates of the model went by without a call of its method, so that the model learns without "
            "it: call method(batch) in place of your own loss and its backward pass, or create the method when you "
            "start to use it",
            stacklevel=4,
        )


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer has parameters of a model, as they are now: FSDP2 replaces them."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
