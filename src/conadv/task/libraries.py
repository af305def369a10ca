"""Models of timm and torchvision, with new weights (nothing is downloaded) or theirs, and your own.

Any model can start from trained weights: those of its library, or of a safetensors file.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from conadv.catalog import MODEL_LIBRARIES

_NORMALIZE = "normalize_pixels"
_LONGEST = 300  # characters of another library's message
# They return more than logits in training.
_WITH_AUXILIARY_OUTPUTS = ("googlenet", "inception_v3")


def build_from_library(
    reference: str, classes: int, in_channels: int, normalize: nn.Module, pretrained: bool = False
) -> nn.Module:
    """Build the model timm:NAME or torchvision:NAME, with the library's own state keys.

    `normalize` is applied to images in [0, 1] first, and not part of the state. If it is `pretrained`, the library
    downloads its weights, and the last layer is new where the number of classes differs.
    """
    library, _, name = reference.partition(":")
    assert library in MODEL_LIBRARIES
    make = _from_timm if library == "timm" else _from_torchvision
    model = make(_imported(library), name, classes, in_channels, pretrained)
    model.add_module(_NORMALIZE, normalize)  # it follows the model to its device, and has no keys in its state
    model.register_forward_pre_hook(_normalize)
    return model


def trained_with(reference: str) -> dict[str, tuple[float, ...]]:
    """Return mean and std of the images that the weights of timm:NAME were trained with; empty: it does not say."""
    library, _, name = reference.partition(":")
    facts = None
    if library == "timm":
        with suppress(RuntimeError):  # NAME.TAG without such weights: whoever builds the model is told
            facts = _imported(library).get_pretrained_cfg(name)
    return {"mean": tuple(facts.mean), "std": tuple(facts.std)} if facts else {}


def load_callable(reference: str) -> Callable[..., object]:
    """Import `package.module:callable`. The current folder is searched last, after installed packages."""
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{reference!r} does not name a callable: write package.module:callable")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module runs code of its own, which may raise anything
        raise ValueError(f"cannot import {module_name!r} of {reference!r}: {first_line(error)}") from error
    try:
        found = attrgetter(attribute)(module)
    except AttributeError as error:
        raise ValueError(f"{module_name!r} has no {attribute!r}: check the name after the colon") from error
    if not callable(found):
        raise ValueError(f"{reference!r} is of type {type(found).__name__}: name a function or a class")
    return found  # type: ignore[no-any-return]


def build_from_callable(reference: str, classes: int, in_channels: int) -> nn.Module:
    """Build your own model: `package.module:callable` is called as callable(classes=..., in_channels=...).

    The model takes images in [0, 1] and normalizes them itself.
    """
    factory = load_callable(reference)
    try:
        inspect.signature(factory).bind(classes=classes, in_channels=in_channels)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{reference!r} must accept (classes=..., in_channels=...): {first_line(error)}") from error
    model = factory(classes=classes, in_channels=in_channels)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{reference!r} returned a value of type {type(model).__name__}: return a torch.nn.Module")
    return model


def build_pretrained(build: Callable[..., nn.Module], start: bool | str, classes: int) -> tuple[nn.Module, str]:
    """Build a model that starts from trained weights; for another number of classes, its last layer is new.

    Args:
        build: `build_model` with its arguments, except for `pretrained`.
        start: True: the weights of timm or torchvision. Otherwise the path of a safetensors file.
        classes: Number of classes of the model.

    Returns:
        The model, without branches, and one line that says what it starts from.
    """
    if isinstance(start, bool):
        return build(pretrained=True), "pretrained: the weights of its library, with a new last layer for other classes"
    try:
        weights = safetensors.torch.load_file(start)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"pretrained {start}: not a safetensors file that can be read ({error})") from None
    model = build()
    new = load_weights(model, weights, classes, start)
    return model, f"pretrained: {start}" + (f", except {', '.join(new)}: new, for {classes} classes" if new else "")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], classes: int, source: str) -> list[str]:
    """Load the whole state of a model that may have been trained for another number of classes.

    Returns:
        The names of the tensors of the last layer, if they do not fit and stay new.
    """
    own = model.state_dict()
    # A tensor of the last layer differs in its first axis, which is the classes.
    new = {
        name: tensor
        for name, tensor in own.items()
        if name in weights
        and tensor.shape != weights[name].shape
        and tensor.shape == (classes, *weights[name].shape[1:])
    }
    try:
        model.load_state_dict({**weights, **new})
    except RuntimeError as error:
        raise ValueError(
            f"the weights of {source} are of another model: {shorten(str(error), _LONGEST)}; choose the model and the "
            "width that they were trained with"
        ) from None
    return sorted(new)


def _from_timm(timm: Any, name: str, classes: int, in_channels: int, pretrained: bool) -> nn.Module:
    if not timm.is_model(name):
        raise ValueError(_unknown("timm", name, timm.list_models()))
    what = "with its weights " if pretrained else ""
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=classes, in_chans=in_channels)  # type: ignore[no-any-return]
    except Exception as error:  # a model may refuse these options in its own way, or its weights not be there
        raise ValueError(
            f"timm:{name} cannot be built {what}for {in_channels} channels: {first_line(error)}"
        ) from error


def _from_torchvision(torchvision: Any, name: str, classes: int, in_channels: int, pretrained: bool) -> nn.Module:
    models = torchvision.models
    # Those for classification; others load a backbone from the network.
    known = [one for one in models.list_models(module=models) if one not in _WITH_AUXILIARY_OUTPUTS]
    if name not in known:
        raise ValueError(_unknown("torchvision", name, known))
    if in_channels != 3:
        raise ValueError(
            f"torchvision:{name} needs images with 3 channels, not {in_channels}: choose a timm model, which can be "
            "built for any number"
        )
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes)
    if pretrained:
        try:
            trained = models.get_model(name, weights="DEFAULT")
        except Exception as error:  # no network, or no weights for this model
            raise ValueError(f"torchvision has no weights for {name} here: {first_line(error)}") from error
        load_weights(model, trained.state_dict(), classes, f"torchvision:{name}")
    return model


def _imported(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except Exception as error:  # such as a library that was built for another PyTorch
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise ValueError(f"{library} is not installed: pip install {library}") from None
        raise ValueError(f"cannot import {library}: {first_line(error)}") from error


def _normalize(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (model.get_submodule(_NORMALIZE)(inputs[0]), *inputs[1:])


def _unknown(library: str, name: str, known: Sequence[str]) -> str:
    near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0))
    return f"{library} has no classification model {name!r}: the nearest are {near}"


def first_line(error: Exception) -> str:
    """The class name and the first line of an error."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
