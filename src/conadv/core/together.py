"""`together`: the parts of a chunk in one pass of the model, and a check that separate passes give the same.

images ┐                  ┌► loss of the images ┐
       ├► joined ► model ─┤                     ├► one backward pass
twins  ┘                  └► loss of the twins  ┘
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .attack import without_trace
from .batchnorm.ways import Branch, Joint
from .checks.mean_loss import close
from .parts import Part


def branch_of(parts: Sequence[Part]) -> Branch:
    """The branch, or branches, of the images of one pass."""
    if len(parts) == 1:
        return parts[0].branch
    return Joint(tuple(part.branch for part in parts), tuple(len(part.images) for part in parts))


def joined(parts: Sequence[Part]) -> Tensor:
    """Join the images of one pass. The result is not a leaf of the graph, since a model may work in place."""
    if len(parts) == 1:
        images = parts[0].images
        return images.clone() if images.requires_grad else images
    kinds = {(tuple(part.images.shape[1:]), part.images.dtype) for part in parts}
    if len(kinds) > 1:
        shapes = " and ".join(f"{part.branch} {tuple(part.images.shape)}" for part in parts)
        raise ValueError(f"together=True: images of different shapes or types ({shapes}) fit no joint pass: drop it")
    return torch.cat([part.images for part in parts])


def outputs_by_part(outputs: Any, parts: Sequence[Part]) -> list[Any]:
    """Split the outputs of the model by part."""
    if len(parts) == 1:
        return [outputs]
    sizes = [len(part.images) for part in parts]
    leaves, structure = tree_flatten(outputs)
    split = [_split(leaf, sizes) for leaf in leaves]
    return [tree_unflatten(list(own), structure) for own in zip(*split, strict=True)]


def _split(leaf: Any, sizes: list[int]) -> Sequence[Any]:
    if isinstance(leaf, Tensor) and leaf.shape[:1] == (sum(sizes),):
        return list(leaf.split(sizes))
    if leaf is None or isinstance(leaf, bool | str):
        return [leaf] * len(sizes)
    given = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
    raise ValueError(
        f"together=True: the model returns {given} for {sum(sizes)} images, which cannot be split by image: drop it"
    )


def check_joint(model: nn.Module, parts: Sequence[Part], losses: Callable[[Sequence[Part]], list[Tensor]]) -> None:
    """Refuse a model whose joint pass differs from separate ones. Leaves no trace, and waits for the device.

    Args:
        model: the network, without wrappers.
        parts: of a chunk.
        losses: the mean loss of each of some parts, from one pass.
    """
    device = parts[0].images.device
    probes = [part._replace(images=part.images.detach() / (1 + number)) for number, part in enumerate(parts)]
    with torch.no_grad(), _not_compiled(), torch.autocast(device.type, enabled=False):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        with without_trace(model, branch_of(probes), None, 0):
            drawn = _generators(device)
            both = losses(probes)
            if any(not torch.equal(old, new) for old, new in zip(drawn, _generators(device), strict=True)):
                raise ValueError(
                    "together=True: the model draws random numbers (dropout?), others in one pass: drop it"
                )
            for name, buffer in model.named_buffers():
                if name in buffers and not torch.allclose(buffer, buffers[name], rtol=0, atol=0, equal_nan=True):
                    raise ValueError(f"together=True: {name} moves with each pass, and there is only one: drop it")
        for number, probe in enumerate(probes):
            with without_trace(model, probe.branch, None, 0):
                (alone,) = losses([probe])
            if not close(both[number], alone, alone):
                raise ValueError(
                    f"together=True: the loss of {probe.branch} images is {float(both[number]):.6g} in one pass with "
                    f"the others, {float(alone):.6g} by themselves: the model mixes the images of a batch, so drop it"
                )


def _generators(device: torch.device) -> list[Tensor]:
    """The states of PyTorch's generators that a model may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _not_compiled() -> AbstractContextManager[Any]:
    """A context in which compiled models run eagerly: a check should not compile another graph."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
