"""What a step learns from (parts) and returns (losses), and the arguments that every method takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from .attack import Attack, Call, call_plainly
from .batch import Batch
from .roles import Place


class Common(TypedDict, total=False):
    """The keyword arguments that every method takes."""

    chunk_size: int | None
    """Images that share BatchNorm statistics and are worked on at once; it divides the batch. None: the whole batch."""
    seed: int | None
    """Decides everything random in the method and the model. None: PyTorch's global seed."""
    autocast: torch.dtype | None
    """Run forward passes in this precision; None: that of the surrounding torch.autocast, if there is one."""
    batch: Callable[[Any], Batch] | None
    """From what the loader yields to a `Batch`; None: it yields (images, labels)."""
    input_name: str | None
    """The model's keyword argument for the images, where a batch has `extra` inputs. None: the first argument."""
    together: bool
    """Learn from the images and the twins of a chunk in one pass of the model: fewer and larger kernels, and twice the
    activations in memory. The numbers are those of separate passes, to rounding; a model for which they would not be
    (dropout, layers that mix the images of a batch) is refused. A part that is alone in its chunk is not affected."""
    place: Place
    """The place of this process among the ranks; by default it is alone, or a rank of a data-parallel loop."""


def check_arguments(model: Any, loss: Any, common: Common, twin_branch: str | None) -> None:
    """Refuse arguments of a method that cannot be what they are passed for."""
    chunk_size = common.get("chunk_size")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size}: take at least 1 image, or None for the whole batch")
    if not isinstance(model, nn.Module) or isinstance(loss, Attack):
        given = f"({type(model).__name__}, {type(loss).__name__}, ...)"
        raise ValueError(f"a method takes (model, loss, attack) in this order, not {given}")
    if isinstance(loss, type):
        raise ValueError(f"the loss {loss.__name__} is a class: pass one of its objects, {loss.__name__}()")
    if next(model.parameters(), None) is None:
        raise ValueError("a model without parameters has nothing to learn")
    if common.get("together") and common.get("input_name") is not None:
        raise ValueError("together=True joins images only, not what input_name= is passed for: drop one of them")
    if twin_branch not in (None, "adv", "main"):
        raise ValueError(f'twin_branch {twin_branch!r}: take "adv" or "main"')
    if common.get("together") and twin_branch == "main":
        raise ValueError('together=True needs twin_branch="adv": drop one of them')


class Part(NamedTuple):
    """Images that a step learns from, the branch they go through, and their weight in the loss."""

    branch: str
    images: Tensor
    labels: Any
    weight: float
    call: Call = call_plainly
    per_chunk: float = 1
    """How many parts of this kind a chunk has on average: views of the same images, or the share with twins."""
    tracked: bool = True
    """Whether its pass updates the running statistics."""
    adversarial: bool = False
    """Whether its loss is adversarial: of changed images, or at changed weights."""
    extra: Mapping[str, Any] = MappingProxyType({})
    """Further inputs of the model, which `call` passes."""

    @property
    def is_learnt(self) -> bool:
        """Whether a step learns from it; otherwise only a direction is computed with it."""
        return self.tracked or self.adversarial


class Losses(NamedTuple):
    """Mean losses over this process' share of the batch, without a graph; zero if it does not compute one."""

    clean: Tensor
    adv: Tensor


class LossSums:
    """The losses of a step so far."""

    def __init__(self) -> None:
        self._clean: list[Tensor] = []
        self._adv: list[Tensor] = []

    def add(self, part: Part, loss: Tensor, count: int) -> None:
        """Add the mean loss of a part, in a step with `count` chunks."""
        if part.is_learnt:
            (self._adv if part.adversarial else self._clean).append(loss.detach() / (count * part.per_chunk))

    def total(self, device: torch.device, dtype: torch.dtype) -> Losses:
        """The mean losses of the step."""
        none = torch.zeros((), device=device, dtype=torch.promote_types(dtype, torch.float32))
        clean, adv = (torch.stack(losses).sum() if losses else none.clone() for losses in (self._clean, self._adv))
        return Losses(clean, adv)
