"""The state of a run as tensors by name, and back: weights, optimizer, and the weights that twins were made with."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class StaleWeights:
    """The weights of the last `delay` steps: what twins in flight were made with, and can be made with again.

    They take the place of the twins in a checkpoint, which so does not grow with the batch; and where one rank attacks
    and learns, in memory too.
    """

    def __init__(self, model: nn.Module, delay: int) -> None:
        self._model = model
        self._kept = deque({name: torch.clone(own.detach()) for name, own in self._own()} for _ in range(delay))

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the weights as they are now, before an update, in place of the oldest."""
        if self._kept:
            self._kept.rotate(-1)
            for name, own in self._own():
                self._kept[-1][name].copy_(own)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within, the model has the oldest weights: those of `delay` steps ago."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def versions(self) -> list[dict[str, Tensor]]:
        """Oldest first."""
        return list(self._kept)

    def load(self, versions: list[dict[str, Tensor]]) -> None:
        for kept, version in zip(self._kept, versions, strict=True):
            for name, tensor in version.items():
                kept[name].copy_(tensor)

    def _swap(self) -> None:
        oldest = self._kept[0]
        # A weight that the model uses under two names is swapped once.
        for own, old in {id(own): (own, oldest[name]) for name, own in self._own()}.values():
            own.data, old.data = old.data, own.data

    def _own(self) -> Iterable[tuple[str, Tensor]]:
        """The model's tensors themselves, asked for anew: a model may put another in the place of a buffer."""
        return self._model.state_dict(keep_vars=True).items()


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
