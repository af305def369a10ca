"""Checks of the loop around a method: how it calls the method, runs the backward pass and updates the weights."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from conadv.core.attack import Loss

from .own_loss import OwnLoss, can_be_watched
from .peers import check_ranks
from .uncalled import expect_call, note_call
from .updates import Accumulation, BranchUpdates, IdleWeights, check_branches, check_cleared

# Batches of a feed without a call; frameworks and prefetchers take some of them ahead.
_UNCALLED = 8


class LoopChecks:
    """Check the loop, mostly in the first steps, for mistakes that would silently train wrongly.

    Args:
        model: the network.
        loss: from outputs and labels to the mean loss.
        chunk_size: images per chunk, or None.
        branches: the BatchNorm branches that the method trains; empty: the model need not be split.
        alone: the method was not given a place among other ranks.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, chunk_size: int | None, branches: tuple[str, ...], alone: bool
    ) -> None:
        self.model = model
        self._chunk_size = chunk_size
        self._branches = branches
        self._alone = alone
        self._calls = 0
        self._fed = 0  # batches of a feed, before the first call
        self._dropped = DroppedLosses()
        self._own_loss = OwnLoss(model, loss) if alone and can_be_watched(model) else None
        self._idle = IdleWeights(model)
        self._branch_updates = BranchUpdates(model) if "adv" in branches else None
        self._accumulation = Accumulation(model)
        if branches:
            check_branches(model, branches)
        if alone:
            expect_call(self)

    def look_at_feed(self, step: int) -> None:
        """Warn if batches come from a method's feed, and the method was never called."""
        self._fed += 1
        if self._fed == _UNCALLED and self._calls == step == 0:  # one that was resumed may skip what it has learnt from
            note_call(self.model)  # one warning is enough
            warnings.warn(
                f"{_UNCALLED} batches of method.feed(loader) went by without a call of the method, so that the model "
                "learns without it: call method(now, ahead), or backpropagate method.loss(now, ahead), in place of "
                "your own loss",
                stacklevel=4,
            )

    def await_backward(self, loss: Tensor) -> None:
        """Expect that the caller backpropagates this loss of a step."""
        self._dropped.add(loss)

    def begin_step(self, batch: Any, step: int, delayed: bool, queued: bool, settings: Mapping[str, Any]) -> None:
        """Check the surroundings of a call. Warnings name the line of the user's loop, six frames up.

        Args:
            batch: the one to learn from.
            step: how many steps were taken.
            delayed: each call counts as a step, because what it generates is used in a later one.
            queued: `delay` counts calls, not updates, because twins wait in a queue.
            settings: what has to be the same on all ranks, see `peers.described`.
        """
        note_call(self.model)
        if not torch.is_grad_enabled():
            raise ValueError(
                "a method takes training steps, and gradients are off here (torch.no_grad, inference_mode): "
                "to evaluate, call the model itself"
            )
        if self._calls == 0 and self._branches:
            check_branches(self.model, self._branches)  # layers may have been replaced since the method was created
        check_cleared(self.model)
        if self._alone:
            self._alone = check_ranks(self.model, self._calls, settings, self._chunk_size)
            self._dropped.check()
            self._check_own_loss(batch)
        if self._alone:
            self._idle.check(self._calls)
        OwnLoss.working = True
        self._calls += 1
        if self._branch_updates is not None:
            self._branch_updates.check(step)
        if step < 2 and delayed and _in_lbfgs():
            raise ValueError(
                "LBFGS evaluates its closure several times per step, and each would count as a step of this method: "
                "use ConAdv(delay=0), or another optimizer"
            )
        if queued and self._alone:
            self._accumulation.check()

    def end_step(self) -> None:
        """From here on, forward passes of the model are those of the loop."""
        OwnLoss.working = False

    def _check_own_loss(self, batch: Any) -> None:
        if self._own_loss is None:
            return
        is_found = self._own_loss.is_found(batch)
        if is_found or self._calls > 0:
            self._own_loss = None
        if is_found:
            warnings.warn(
                "your loop backpropagates its own loss of a batch that the method learns from, too, which adds those "
                "gradients twice: drop your loss, since the method computes it as well",
                stacklevel=6,
            )


class DroppedLosses:
    """Warn if no loss of `method.loss` is backpropagated. A single one may be skipped, and several may be added up."""

    def __init__(self) -> None:
        self._returned: list[tuple[weakref.ref[Any], Tensor]] = []  # losses, before the first backward pass of one
        self._awaits = True

    def add(self, loss: Tensor) -> None:
        """Remember a loss, as long as none was backpropagated."""
        if self._awaits:

            def reached(_: Tensor) -> None:
                self._awaits, self._returned = False, []

            loss.register_hook(reached)  # which the graph of the loss keeps alive
            self._returned.append((weakref.ref(reached), loss.detach()))

    def check(self) -> None:
        if not self._awaits or len(self._returned) < 2 or self._returned[0][0]() is not None:
            return
        self._awaits = False
        if all(bool(loss.isfinite()) for _, loss in self._returned):  # a loop may skip the others
            warnings.warn(
                f"{len(self._returned)} losses of method.loss were not backpropagated, nor any before: call "
                "method.loss(batch).backward() in each step, or method(batch), which runs the backward pass itself",
                stacklevel=6,
            )
        self._returned = []


def _in_lbfgs() -> bool:
    """Whether an LBFGS step is among the callers. Asking a frame for its variables would keep them alive."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.optim.LBFGS.__module__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
