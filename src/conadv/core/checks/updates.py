"""Checks that the optimizer updates the model of a method, and all of its BatchNorm branches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from conadv.core.batchnorm.branches import split_layers
from conadv.core.batchnorm.splitbn import plain_layers
from conadv.core.wrappers import data_parallel

# The first steps, in which updates of the branches are looked at.
_UPDATES = 16
# Calls after which weights that never changed are not those of an optimizer, nor of gradient accumulation.
_IDLE = 64


def check_branches(model: nn.Module, branches: Sequence[str]) -> None:
    """Refuse a model that would silently mix the statistics of clean and adversarial images."""
    which = "" if tuple(branches) == ("main", "adv") else f", branches={branches}"
    call = f"conadv.split_batchnorm(model{which}) before making the optimizer and the method"
    for name in plain_layers(model):
        raise ValueError(f"layer {name} is a plain BatchNorm layer: call {call}")
    for layer in split_layers(model):
        if not set(branches) <= set(layer.branches):
            raise ValueError(f"the model has only the branches {', '.join(layer.branches)}: call {call}")
    parallel = data_parallel(model)
    if "adv" in branches and parallel is not None and parallel.find_unused_parameters:
        raise ValueError(
            "each pass leaves one branch unused, which find_unused_parameters=True cannot handle: set it to False "
            "(Transformers: ddp_find_unused_parameters=False)"
        )


def check_cleared(model: nn.Module) -> None:
    """Refuse an optimizer that does not have the branches: it would silently never update them."""
    for layer in split_layers(model)[:1]:
        weights = {name: next(owner.parameters(recurse=False), None) for name, owner in layer.owners().items()}
        main = weights["main"]
        if main is not None and main.requires_grad and main.grad is None:
            kept = [name for name, weight in weights.items() if weight is not None and weight.grad is not None]
            if kept:
                raise ValueError(
                    f"the {kept[0]} branch kept the gradients of the last step: "
                    "make the optimizer after split_batchnorm, and clear all gradients"
                )


class BranchUpdates:
    """Refuse an optimizer that has only the main branch, where something else clears all gradients.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions: list[int] = []
        self._left_out = 0

    def check(self, step: int) -> None:
        if step > _UPDATES:
            return
        versions = self._current_versions()
        if self._versions and versions:
            self._left_out += versions[0] != self._versions[0] and versions[1] == self._versions[1]
        self._versions = versions
        if self._left_out > 1:
            raise ValueError("the adv branch is never updated: make the optimizer after split_batchnorm")

    def _current_versions(self) -> list[int]:
        """PyTorch's counters of changes to a weight of the main and of the adv branch."""
        for layer in split_layers(self._model):
            owners = [layer.owner("main"), layer.owner("adv")]
            weights = [weight for owner in owners for weight in owner.parameters(recurse=False) if weight.requires_grad]
            if len(weights) == 4:  # the scale and the shift of both
                return [weights[0]._version, weights[2]._version]
        return []


class IdleWeights:
    """Warn if, after many calls, the weights are those of the first.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._start: tuple[int, float] | None = None  # of the weights, at the first call

    def check(self, calls: int) -> None:
        if calls not in (0, _IDLE):
            return
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        if not weights or type(weights[-1].data) is not Tensor:  # a shard
            return
        # PyTorch's counters of changes, and a sum, since an optimizer that writes to `.data` does not move them.
        now = sum(weight._version for weight in weights), float(weights[-1].detach().double().sum())
        if self._start == now:
            warnings.warn(
                f"the weights of the method's model did not change in {_IDLE} calls: backpropagate "
                "method.loss(batch), call optimizer.step(), and give the optimizer the parameters of the very model "
                "that the method was made with (a deepcopy has others)",
                stacklevel=6,
            )
        self._start = now


class Accumulation:
    """Warn, with twins in a queue, if the first update comes after several steps.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes: int | None = None
        self._steps = 0  # before the first update
        self._updated = False

    def check(self) -> None:
        if self._updated:
            return
        now = sum(parameter._version for parameter in self._model.parameters())  # PyTorch counts changes
        self._updated = self._changes is not None and now != self._changes
        self._changes = now
        self._steps += not self._updated
        if self._updated and self._steps > 1:
            warnings.warn(
                "gradients are accumulated, and with handoff=Queue() delay counts batches, not updates of the weights: "
                "drop handoff=, or multiply delay by the number of accumulated batches",
                stacklevel=6,
            )
