"""What a step learns from (parts) and returns (losses), and the arguments that every method takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from .attack import Call, call_plainly
from .batch import Batch
from .roles import Place


class Common(TypedDict, total=False):
    """The keyword arguments that every method takes."""

    chunk_size: int | None
    """Images that share BatchNorm statistics and are worked on at once; it divides the batch. None: the whole batch."""
    seed: int | None
    """Decides everything random in the method and the model. None: PyTorch's global seed."""
    autocast: torch.dtype | None
    """Run forward passes in this precision; None: as the surrounding code says."""
    batch: Callable[[Any], Batch] | None
    """From what the loader yields to a `Batch`; None: it yields (images, labels)."""
    input_name: str | None
    """The model's keyword argument for the images, where a batch has `extra` inputs. None: the first argument."""
    together: bool
    """Learn from the images and the twins of a chunk in one pass of the model: fewer and larger kernels, and twice the
    activations in memory. The numbers are those of separate passes, to rounding; a model for which they would not be
    (dropout, layers that mix the images of a batch) is refused. A part that is alone in its chunk is not affected."""
    place: Place
    """Where this process stands among others; by default it is alone, or a rank of a data-parallel loop."""


class Part(NamedTuple):
    """Images that a step learns from, the branch they go through, and their weight in the loss."""

    branch: str
    images: Tensor
    labels: Any
    weight: float
    call: Call = call_plainly
    per_chunk: float = 1
    """How many parts of this kind a chunk has on average: views of the same images; of twins, the share with any."""
    tracked: bool = True
    """Whether its pass counts for the running statistics."""
    adversarial: bool = False
    """Whether its loss is that of what an adversary changed: the images, or the weights."""


class Losses(NamedTuple):
    """Mean losses over this process' share of the batch, without a graph; zero if it does not compute one."""

    clean: Tensor
    adv: Tensor
