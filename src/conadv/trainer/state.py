"""The state of a run as tensors by name, and back.

model.NAME      weights and buffers          optimizer.NAME:KEY   what the optimizer remembers of a parameter
ema.NAME        their moving average         stale.0.NAME         weights that twins in flight were made with
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conadv.core.stale import StaleWeights

from .ema import Ema

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def gather(model: nn.Module, optimizer: Optimizer, stale: StaleWeights, ema: Ema) -> dict[str, Tensor]:
    """A copy of everything on the host."""
    tensors = live_state(model, optimizer, stale, ema)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def live_state(model: nn.Module, optimizer: Optimizer, stale: StaleWeights, ema: Ema) -> dict[str, Tensor]:
    """Everything as it is until the next update: the tensors themselves, and copies of what forward passes may change.

    An attack with stale weights exchanges the memory of parameters, not its contents, so these tensors stay.
    """
    changing = {name for name, _ in model.named_buffers()}
    own = model.state_dict().items()
    tensors = {f"model.{name}": tensor.clone() if name in changing else tensor for name, tensor in own}
    for state in _optimizer_state(model, optimizer):
        tensors.update(state)
    for number, version in enumerate(stale.versions()):
        tensors.update({f"stale.{number}.{name}": tensor for name, tensor in version.items()})
    tensors.update({f"ema.{name}": tensor for name, tensor in ema.tensors().items()})
    return {name: tensor.detach() for name, tensor in tensors.items()}


def fill_state(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, by a step with zero gradients; weights and gradients stay as they are.

    Only the optimizer knows the names, shapes, dtypes, devices and memory layouts of what it remembers.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, (weight, gradient) in zip(parameters, kept, strict=True):
            parameter.copy_(weight)
            parameter.grad = gradient


def check_tensors(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, delay: int, averaged: bool
) -> None:
    """Refuse tensors that are not, name by name, the state of this model with as many stale weights.

    The state of `optimizer` must be filled. Of a parameter that has had no gradient yet there may be none of it.
    """
    own = model.state_dict()
    wanted = {prefix + name: tensor for prefix in _prefixes(delay, averaged) for name, tensor in own.items()}
    for state in _optimizer_state(model, optimizer):
        if not state.keys().isdisjoint(tensors):
            wanted |= state
    for name in sorted(wanted.keys() | tensors.keys()):
        if _form(wanted.get(name)) != _form(tensors.get(name)):
            wrong = "is missing, unexpected, or has the wrong shape or dtype"
            raise ValueError(f"is of another model or optimizer: tensor {name} {wrong}")


def largest_size(model: nn.Module, optimizer: Optimizer, delay: int, averaged: bool) -> int:
    """More bytes than the state of this model, and of this optimizer whose state is filled, can have in a file."""
    own = [*model.state_dict().values()] * len(_prefixes(delay, averaged))
    remembered = [tensor for state in _optimizer_state(model, optimizer) for tensor in state.values()]
    # In the header of the file, each tensor has a name, a shape and two offsets.
    size: int = sum(1000 + tensor.numel() * tensor.element_size() for tensor in [*own, *remembered])
    return size + 2**16


def restore(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, stale: StaleWeights, ema: Ema
) -> None:
    """Put the state of a checkpoint back, whose tensors were checked."""
    load_model(model, tensors)
    fill_state(optimizer)
    for name, parameter in model.named_parameters():
        state = optimizer.state.pop(parameter, {})
        saved = {key: tensors[label] for key in state if (label := _label(name, key)) in tensors}
        if saved:
            optimizer.state[parameter] = {key: _like(state[key], saved.get(key)) for key in state}
    if stale.versions():
        stale.load(stale_versions(tensors))
    ema.load(average_weights(tensors))


def stale_versions(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The stale weights of a checkpoint, oldest first."""
    count = len({name.split(".")[1] for name in tensors if name.startswith("stale.")})
    return [_below(f"stale.{number}.", tensors) for number in range(count)]


def average_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moving average of a checkpoint's weights; empty in a run without one."""
    return _below("ema.", tensors)


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The weights of a checkpoint alone."""
    try:
        model.load_state_dict(_below("model.", tensors))
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is of another model: {' '.join(str(error).split())}") from None


def _prefixes(delay: int, averaged: bool) -> list[str]:
    """What names begin with, for each copy of the model: its own, the average, and each version of the stale ones."""
    return ["model.", *["ema."] * averaged, *(f"stale.{number}." for number in range(delay))]


def _label(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}:{key}"


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """What the optimizer remembers of each parameter, by the names in a checkpoint; None is not written."""
    return [
        {_label(name, key): _as_tensor(value) for key, value in state.items() if value is not None}
        for name, parameter in model.named_parameters()
        if (state := optimizer.state.get(parameter))
    ]


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor | bool | int | float):
        raise TypeError(f"a checkpoint holds tensors, numbers and None of an optimizer, not {type(value).__name__}")
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=_DTYPES[type(value)])


def _like(own: Any, saved: Tensor | None) -> Any:
    """A saved value as the optimizer has it: its tensor's device and memory layout, on which last digits may depend."""
    if saved is None:
        return own
    return own.copy_(saved) if isinstance(own, Tensor) else type(own)(saved.item())


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
