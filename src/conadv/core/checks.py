"""Checks for misuse that would silently train wrongly; those that cost something run in the first steps only."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss, _WeightedLoss

from .attack import Attack, Loss
from .branches import split_layers
from .mean_loss import MeanLoss
from .own_loss import OwnLoss, can_be_watched
from .peers import check_ranks
from .splitbn import plain_layers
from .uncalled import note_call
from .wrappers import data_parallel

# The first steps, in which updates of the branches are looked at.
_UPDATES = 16
# Calls after which weights that never changed are not those of an optimizer, nor of gradient accumulation.
_IDLE = 64
# Batches of a feed without a call; frameworks and prefetchers take some of them ahead.
_UNCALLED = 8


class Checks:
    """What is looked at once for a method: its images, its loss, and whether its ranks train one model.

    Args:
        model: the network.
        loss: from outputs and labels to the mean loss.
        chunk_size: images per chunk, or None.
        alone: the method was not given a place among other ranks.
    """

    def __init__(self, model: nn.Module, loss: Loss, chunk_size: int | None, alone: bool) -> None:
        self._model = model
        self._loss = loss
        self._chunk_size = chunk_size
        self._alone = alone
        self._seen_images = self._seen_labels = self._seen_loss = False
        self._mean = MeanLoss(loss, chunk_size is not None)
        self._branches: tuple[str, ...] = ()
        self._versions: list[int] = []
        self._left_out = 0
        self._changes: int | None = None
        self._updated = False
        self._steps = 0  # before the first update of the weights
        self._calls = 0
        self._fed = 0  # batches of a feed, before the first call
        self._own_loss = OwnLoss(model, loss) if alone and can_be_watched(model) else None
        self._returned: list[tuple[weakref.ref[Any], Tensor]] = []  # losses, before the first backward pass of one
        self._awaits = True
        self._start: tuple[int, float] | None = None  # of the weights, at the first call
        if isinstance(loss, _Loss) and loss.reduction != "mean":
            raise ValueError(f'the loss has reduction="{loss.reduction}": a method needs the mean, reduction="mean"')
        if self._chunk_size is not None and isinstance(loss, _WeightedLoss) and loss.weight is not None:
            raise ValueError(
                "a loss with class weights is not the mean of its chunks: pass chunk_size=None, "
                "or multiply per-image losses by their weights and take the plain mean"
            )

    def look_at_images(self, attack: Attack, images: Tensor) -> None:
        """Whether the first images are in the range of the attack."""
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
        ignored = labels < 0
        if getattr(self._loss, "ignore_index", -1) >= 0:
            ignored |= labels == self._loss.ignore_index  # type: ignore[attr-defined]
        if bool(ignored.any()):
            raise ValueError(
                "labels that the loss ignores (below 0, or ignore_index) with chunks: each chunk would be averaged "
                "over another number of images; pass chunk_size=None, or drop these images"
            )

    def look_at_loss(self, loss: Any, outputs: Any, labels: Any, images: Tensor) -> None:
        """Check that the loss is a mean over the images, also over those of two chunks."""
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f'the loss returns {shape}, not one number: use reduction="mean"')
        if self._alone and not self._seen_loss and not bool(loss.isfinite()) and not bool(images.isfinite().all()):
            raise ValueError(
                f"the images have NaN or infinity, so the loss is {loss.item()}: look at how they are made (a division "
                "by 0 in the normalization?)"
            )
        self._seen_loss = True
        self._mean.look(loss, outputs, labels, len(images))

    def look_at_feed(self, step: int) -> None:
        """Warn where batches come from a method's feed, and the method was never called."""
        self._fed += 1
        if self._fed == _UNCALLED and self._calls == step == 0:  # one that was resumed may skip what it has learnt from
            note_call(self._model)  # one warning is enough
            warnings.warn(
                f"{_UNCALLED} batches of method.feed(loader) went by without a call of the method, so that the model "
                "learns without it: call method(now, ahead), or backpropagate method.loss(now, ahead), in place of "
                "your own loss",
                stacklevel=4,
            )

    def await_backward(self, loss: Tensor) -> None:
        """Expect that the caller backpropagates this loss of a step, as long as none was."""
        if self._awaits:

            def reached(_: Tensor) -> None:
                self._awaits, self._returned = False, []

            loss.register_hook(reached)  # which the graph of the loss keeps alive
            self._returned.append((weakref.ref(reached), loss.detach()))

    def begin_step(self, batch: Any, step: int, delayed: bool, queued: bool, settings: Mapping[str, Any]) -> None:
        """Look at the surroundings, and in the first steps also at the callers and the other ranks."""
        if not torch.is_grad_enabled():
            raise ValueError(
                "a method takes training steps, and gradients are off here (torch.no_grad, inference_mode): "
                "to evaluate, call the model itself"
            )
        if self._calls == 0 and self._branches:
            check_branches(self._model, self._branches)  # layers may have been replaced since the method was made
        _check_cleared(self._model)
        self._mean.begin_step()
        if self._alone:
            self._alone = check_ranks(self._model, self._calls, settings, self._chunk_size)
            self._check_backward()
            self._check_own_loss(batch)
        if self._alone and self._calls in (0, _IDLE):
            self._check_trained()
        OwnLoss.working = True
        self._calls += 1
        if step <= _UPDATES:
            self._check_updated()
        if step < 2 and delayed and _in_lbfgs():
            raise ValueError(
                "LBFGS evaluates its closure several times per step, and each would count as a step of this method: "
                "use ConAdv(delay=0), or another optimizer"
            )
        if queued and self._alone and not self._updated:
            self._look_for_accumulation()

    def end_step(self) -> None:
        """Passes of the model are those of the loop again."""
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

    def _check_backward(self) -> None:
        """Warn if the first losses were dropped; one alone may be skipped, and several may be added up."""
        if not self._awaits or len(self._returned) < 2 or self._returned[0][0]() is not None:
            return
        self._awaits = False
        if all(bool(loss.isfinite()) for _, loss in self._returned):  # others may be skipped
            warnings.warn(
                f"{len(self._returned)} losses of method.loss were not backpropagated, nor any before: call "
                "method.loss(batch).backward() in each step, or method(batch), which runs the backward pass itself",
                stacklevel=6,
            )
        self._returned = []

    def _check_trained(self) -> None:
        """Warn if the weights are, after many calls, those of the first."""
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

    def _look_for_accumulation(self) -> None:
        """Warn before the step after the first update, if that came after several steps."""
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

    def use(self, branches: tuple[str, ...]) -> None:
        """Expect that all of these branches are trained."""
        self._branches = branches

    def _check_updated(self) -> None:
        """Refuse an optimizer that has the main branch alone, where something else clears all gradients."""
        if "adv" not in self._branches:
            return
        versions = self._changes_of_branches()
        if self._versions and versions:
            self._left_out += versions[0] != self._versions[0] and versions[1] == self._versions[1]
        self._versions = versions
        if self._left_out > 1:
            raise ValueError("the adv branch is never updated: make the optimizer after split_batchnorm")

    def _changes_of_branches(self) -> list[int]:
        """How often the weights of the main and of the adv branch were changed, by PyTorch's counters."""
        for layer in split_layers(self._model):
            owners = [layer.owner("main"), layer.owner("adv")]
            weights = [weight for owner in owners for weight in owner.parameters(recurse=False) if weight.requires_grad]
            if len(weights) == 4:  # the scale and the shift of both
                return [weights[0]._version, weights[2]._version]
        return []


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


def _check_cleared(model: nn.Module) -> None:
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


def _in_lbfgs() -> bool:
    """Whether an LBFGS step is among the callers. Asking a frame for its variables would keep them alive."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.optim.LBFGS.__module__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
