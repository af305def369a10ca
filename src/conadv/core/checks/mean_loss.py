"""Checks, mostly in the first steps, that a loss is the mean over the images, also over those of several chunks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from conadv.core.attack import Loss

# Chunks are compared in the first steps, then in steps 16, 32, 64 and so on: labels that a loss ignores may come
# late, and each comparison waits for the device.
_STEPS = 8


class MeanLoss:
    """Compare the loss of images with that of the same images given twice, and of two chunks with both together.

    Outputs and labels may be tensors, or structures and objects that hold tensors; what cannot be joined is not
    checked.

    Args:
        loss: from outputs and labels to the mean loss.
        chunked: batches are cut into chunks.
    """

    def __init__(self, loss: Loss, chunked: bool) -> None:
        self._loss = loss
        self._seen_twice = False
        self._chunked = chunked
        self._compares = False
        self._first: tuple[Tensor, Any, Any] | None = None  # of the first chunk of a step
        self._steps = 0

    def begin_step(self) -> None:
        """Forget the chunks of the last step."""
        self._steps += 1
        self._compares = self._chunked and (self._steps <= _STEPS or self._steps & (self._steps - 1) == 0)
        self._first = None

    @torch.no_grad()
    def look(self, loss: Tensor, outputs: Any, labels: Any, count: int) -> None:
        """Check the loss of `count` images."""
        if not self._seen_twice:
            self._seen_twice = True
            twice = self._together(outputs, outputs, labels, labels, count)
            if twice is not None and not close(twice, loss, outputs):
                raise ValueError(
                    f"the loss of images given twice is {float(twice):.4g}, not {float(loss):.4g} as once: "
                    'a method needs the mean over the images, reduction="mean"'
                )
        if self._compares:
            self._compare_chunks(loss.detach(), outputs, labels, count)

    def _compare_chunks(self, loss: Tensor, outputs: Any, labels: Any, count: int) -> None:
        if self._first is None:
            self._first = loss, _detached(outputs), labels
            return
        first, first_outputs, first_labels = self._first
        if _same(first_labels, labels):  # the twins of this chunk, which would hide class weights
            return
        both = self._together(first_outputs, outputs, first_labels, labels, count)
        if both is not None and not close(both, (first + loss) / 2, outputs):
            raise ValueError(
                "the loss of two chunks is not the mean of their losses (class weights, or ignored labels?): "
                "pass chunk_size=None"
            )

    def _together(self, one: Any, other: Any, labels: Any, other_labels: Any, count: int) -> Tensor | None:
        """The loss of two chunks joined; None if they cannot be joined."""
        try:
            return self._loss(_joined(one, other, count), _joined(labels, other_labels, count))
        except Exception:  # anything that a user's loss may raise for inputs that it does not expect
            return None


def _joined(one: Any, other: Any, count: int) -> Any:
    """Join two structures with values for `count` images each; other values are those of the first."""
    leaves, structure = tree_flatten(one)
    pairs = zip(leaves, tree_leaves(other), strict=True)
    return tree_unflatten([_joined_leaf(mine, theirs, count) for mine, theirs in pairs], structure)


def _joined_leaf(one: Any, other: Any, count: int) -> Any:
    if isinstance(one, Tensor):
        return torch.cat([one, other]) if one.dim() > 0 and len(one) == count else one
    held = {name: value for name, value in getattr(one, "__dict__", {}).items() if isinstance(value, Tensor)}
    if not held:
        return one
    both = copy.copy(one)
    vars(both).update({name: _joined_leaf(value, vars(other)[name], count) for name, value in held.items()})
    return both


def _detached(values: Any) -> Any:
    return values.detach() if isinstance(values, Tensor) else values


def _same(one: Any, other: Any) -> bool:
    """Whether two structures have equal tensors."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs if isinstance(mine, Tensor))


def close(left: Tensor, right: Tensor, outputs: Any) -> bool:
    """Whether two losses are equal up to the rounding of outputs of this precision."""
    if not bool(left.isfinite() & right.isfinite()):
        return True  # a loss that is not finite is noticed elsewhere
    kinds = [leaf.dtype for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    rounding = 16 * torch.finfo(max([*kinds, right.dtype], key=lambda kind: torch.finfo(kind).eps)).eps ** 0.75
    return bool(torch.isclose(left.double(), right.double(), rtol=rounding, atol=rounding))
