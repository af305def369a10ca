"""Running statistics that no branch owns: found by what a forward pass in training mode changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from conadv.core.batchnorm.branches import split_layers

_MIXED = "shares_statistics"  # the attribute that marks a module


def allow_mixed(model: nn.Module, kinds: Sequence[type[nn.Module]]) -> None:
    """Let layers of these classes, and their children, share statistics between all images."""
    for kind in kinds:
        found = [module for module in model.modules() if isinstance(module, kind)]
        if not found:
            raise ValueError(f"mixed={kind.__name__}: the model has no layer of this class")
        for module in (inner for layer in found for inner in layer.modules()):
            setattr(module, _MIXED, True)


@contextmanager
def no_mixed_statistics(model: nn.Module) -> Iterator[None]:
    """Refuse a forward pass, within this context, that changes a floating-point buffer which no branch owns.

    Constant buffers (masks, position tables, frozen statistics), counters and the vectors of spectral norm, which
    follow from the weights alone, are not statistics of images.
    """
    watched = [(name, module) for name, module in model.named_modules() if not _is_exempt(module)]
    before = [{key: buffer.clone() for key, buffer in _buffers(module)} for _, module in watched]
    yield
    owners = {owner for layer in split_layers(model) for owner in layer.owners().values()}
    for (name, module), buffers in zip(watched, before, strict=True):
        for key, buffer in _buffers(module):
            pending = module in owners and key == "pending"
            if not pending and key in buffers and _differs(buffer, buffers[key]):
                raise ValueError(_message(name, module, key, module in owners))


def _differs(new: Tensor, old: Tensor) -> bool:
    """Whether a buffer changed. One of another shape is a table that was built again, not a moving average."""
    return new.shape == old.shape and not torch.allclose(new, old, rtol=0, atol=0, equal_nan=True)


def _message(name: str, module: nn.Module, key: str, is_split: bool) -> str:
    if is_split:
        return (
            f"{name}.{key} changed though its layer did not run: the model uses the tensors of {name} by itself, so "
            "images cannot be routed through its branches; let it call the layer"
        )
    kind = type(module).__name__
    return (
        f"{name} ({kind}) tracks statistics of images in its buffer {key}, which clean and adversarial images would "
        f"share: call split_batchnorm(model, also=({kind},)) to give it branches, or mixed=({kind},) to share them"
    )


def _is_exempt(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    spectral = isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
    return spectral or _MIXED in vars(module)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            yield key, buffer
