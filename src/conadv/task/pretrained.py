"""Weights to start from, in a safetensors file or from the library of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import safetensors
import safetensors.torch
from torch import Tensor, nn

LIBRARY = "library"
_LISTED = 3  # problems in a message


def build_pretrained(build: Callable[..., nn.Module], start: str, classes: int) -> tuple[nn.Module, str]:
    """Build a model that starts from trained weights; for another number of classes, its last layer is new.

    Args:
        build: `build_model` with its arguments, except for `pretrained`.
        start: "library": the weights that timm or torchvision has for the model, which it downloads. Otherwise the path
            of a safetensors file, such as one that `conadv export` wrote.
        classes: Number of classes of the model.

    Returns:
        The model, without branches, and one line that says what it starts from.
    """
    if start == LIBRARY:
        return build(pretrained=True), "pretrained: the weights of its library, with a new last layer for other classes"
    try:
        weights = safetensors.torch.load_file(start)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"pretrained {start}: not a safetensors file that can be read ({error})") from None
    model = build()
    new = load_weights(model, weights, classes, start)
    return model, f"pretrained: {start}" + (f", except {', '.join(new)}: new, for {classes} classes" if new else "")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], classes: int, source: str) -> list[str]:
    """Load the weights of a model that may have been trained for another number of classes.

    Args:
        model: What to load the weights into.
        weights: Tensors by name, all those of the model's state.
        classes: Number of classes of the model.
        source: Where the weights are from, for errors.

    Returns:
        The names of the tensors of the last layer, if they do not fit and stay new.
    """
    own = model.state_dict()
    # A tensor of the last layer differs in its first axis, which is the classes.
    new = [name for name in own.keys() & weights.keys() if _is_for_other_classes(own[name], weights[name], classes)]
    wrong = [
        *(f"{name} is missing" for name in own if name not in weights),
        *(f"{name} is not one of the model's" for name in weights if name not in own),
        *(
            f"{name} has shape {tuple(weights[name].shape)}, not {tuple(own[name].shape)}"
            for name in own
            if name in weights and name not in new and weights[name].shape != own[name].shape
        ),
    ]
    if wrong:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(
            f"the weights of {source} are of another model: {', '.join(wrong[:_LISTED])}{more}; "
            "choose the model and the width that they were trained with"
        )
    model.load_state_dict({**weights, **{name: own[name] for name in new}})
    return sorted(new)


def _is_for_other_classes(own: Tensor, other: Tensor, classes: int) -> bool:
    return own.shape != other.shape and own.shape == (classes, *other.shape[1:])
