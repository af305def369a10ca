"""The state of a run as tensors by name, and back: weights, optimizer, and the weights that twins were made with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conadv.core.stale import StaleWeights


def gather(model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> dict[str, Tensor]:
    """A copy of everything, so that training can go on while it is written."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}:{key}"] = value
    for number, version in enumerate(stale.versions()):
        tensors.update({f"stale.{number}.{name}": tensor for name, tensor in version.items()})
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def check_tensors(tensors: Mapping[str, Tensor], model: nn.Module, delay: int) -> None:
    """Refuse tensors that are not, name by name, the state of this model with as many stale weights."""
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    parts = ["model.", *(f"stale.{number}." for number in range(delay))]
    wanted = {prefix + name: form for prefix in parts for name, form in own.items()}
    # What an optimizer remembers has the form of its parameter, and there may be none of it yet.
    parameters = dict(model.named_parameters())
    wanted |= {name: own[parameter] for name in tensors if (parameter := _parameter(name, parameters))}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ValueError(f"is of another model: tensor {name} is missing, too much or of another shape or type")


def largest_size(model: nn.Module, delay: int) -> int:
    """More bytes than the state of this model can have in a file."""
    state = model.state_dict().values()
    tensors: int = sum(tensor.numel() * tensor.element_size() for tensor in state)
    header = 1000 * len(state)  # a name, a shape and two offsets each
    return (2 + delay) * (tensors + header) + 2**16


def restore(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> None:
    """Put the state of a checkpoint back, whose tensors were checked."""
    load_model(model, tensors)
    parameters = dict(model.named_parameters())
    for name, value in _below("optimizer.", tensors).items():
        parameter, _, key = name.rpartition(":")
        # In the layout of memory that the optimizer gives it, on which last digits may depend.
        optimizer.state[parameters[parameter]][key] = torch.empty_like(parameters[parameter]).copy_(value)
    if stale.versions():
        stale.load(stale_versions(tensors))


def stale_versions(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The stale weights of a checkpoint, oldest first."""
    count = len({name.split(".")[1] for name in tensors if name.startswith("stale.")})
    return [_below(f"stale.{number}.", tensors) for number in range(count)]


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The weights of a checkpoint alone."""
    try:
        model.load_state_dict(_below("model.", tensors))
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is of another model: {' '.join(str(error).split())}") from None


def _parameter(name: str, parameters: Collection[str]) -> str | None:
    """The parameter whose state of the optimizer has this name; None: it is no such name."""
    parameter, _, key = name.removeprefix("optimizer.").rpartition(":")
    return parameter if name.startswith("optimizer.") and key and parameter in parameters else None


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
