"""Convert the state of a run to tensors by name, and restore it.

model.NAME           weights and buffers
optimizer.NAME:KEY   optimizer state of a parameter
stale.0.NAME         weights that twins in flight were generated with
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conadv.core.state import below
from conadv.core.twins import StaleWeights

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def gather(model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> dict[str, Tensor]:
    """Copy the whole state to the host."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= _optimizer_state(model, optimizer)
    for number, version in enumerate(stale.versions()):
        tensors.update({f"stale.{number}.{name}": tensor for name, tensor in version.items()})
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def fill_state(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, by a step with zero gradients; weights and gradients are restored.

    Only the optimizer knows the names, shapes, dtypes, devices and memory formats of its state.
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


def expected_tensors(model: nn.Module, optimizer: Optimizer, delay: int) -> dict[str, Tensor]:
    """Return tensors of the names, shapes and dtypes that a checkpoint has; the state of `optimizer` must be filled."""
    copies = ["model.", *(f"stale.{number}." for number in range(delay))]
    own = model.state_dict()
    return {copy + name: own[name] for copy in copies for name in own} | _optimizer_state(model, optimizer)


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if tensors of a checkpoint are not those that are expected.

    A parameter that has had no gradient yet has no optimizer state.
    """
    used = {name.rpartition(":")[0] for name in tensors if name.startswith("optimizer.")}
    optional = {name for name in expected if name.startswith("optimizer.") and name.rpartition(":")[0] not in used}
    for name in sorted((expected.keys() - optional) | tensors.keys()):
        if _form(expected.get(name)) != _form(tensors.get(name)):
            wrong = "is missing, unexpected, or has the wrong shape or dtype"
            raise ValueError(f"is of another model or optimizer: tensor {name} {wrong}")


def largest_size(expected: Mapping[str, Tensor]) -> int:
    """Return an upper bound of the bytes of a checkpoint: each tensor also has a name, a shape and offsets."""
    return 2**25 + sum(1000 + tensor.numel() * tensor.element_size() for tensor in expected.values())


def restore(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> None:
    """Restore the state of a checkpoint that `check_tensors` accepted."""
    load_model(model, tensors)
    fill_state(optimizer)
    for name, parameter in model.named_parameters():
        state = optimizer.state.pop(parameter, {})
        saved = {key: tensors[label] for key in state if (label := _label(name, key)) in tensors}
        if saved:
            optimizer.state[parameter] = {key: _like(state[key], saved.get(key)) for key in state}
    if stale.versions():
        stale.load(stale_versions(tensors))


def stale_versions(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the stale weights in a checkpoint, oldest first."""
    count = len({name.split(".")[1] for name in tensors if name.startswith("stale.")})
    return [below(f"stale.{number}.", tensors) for number in range(count)]


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load weights and buffers from a checkpoint."""
    try:
        model.load_state_dict(below("model.", tensors))
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is of another model: {' '.join(str(error).split())}") from None


def _label(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}:{key}"


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state of the parameters, by the names in a checkpoint; values that are None are left out."""
    return {
        _label(name, key): _as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor | bool | int | float):
        raise TypeError(f"a checkpoint holds tensors, numbers and None of an optimizer, not {type(value).__name__}")
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=_DTYPES[type(value)])


def _like(own: Any, saved: Tensor | None) -> Any:
    """Convert a saved value to the type, device and memory format of the optimizer's own, so that results are equal."""
    if saved is None:
        return own
    return own.copy_(saved) if isinstance(own, Tensor) else type(own)(saved.item())


def _form(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
