"""Concurrent adversarial learning: large-batch training that keeps its accuracy.

These are the public names; everything else may move. They are loaded when they are first used, so that
`conadv --help` does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.attack import PGD
    from .core.learner import Losses
    from .core.methods import ConAdv, Method, Vanilla
    from .core.recycled import Recycled
    from .core.roles import Place, Role
    from .core.splitbn import plain_state_dict, route, split_batchnorm
    from .optim.groups import parameter_groups
    from .optim.lamb import Lamb
    from .optim.lars import Lars
    from .optim.schedule import warmup_constant, warmup_cosine, warmup_poly
    from .parallel.layout import Layout

__all__ = [
    "PGD",
    "ConAdv",
    "Lamb",
    "Lars",
    "Layout",
    "Losses",
    "Method",
    "Place",
    "Recycled",
    "Role",
    "Vanilla",
    "parameter_groups",
    "plain_state_dict",
    "route",
    "split_batchnorm",
    "warmup_constant",
    "warmup_cosine",
    "warmup_poly",
]
__version__ = "0.1.0"

_HOMES = {
    "core.attack": ("PGD",),
    "core.learner": ("Losses",),
    "core.methods": ("ConAdv", "Method", "Vanilla"),
    "core.recycled": ("Recycled",),
    "core.roles": ("Place", "Role"),
    "core.splitbn": ("plain_state_dict", "route", "split_batchnorm"),
    "optim.groups": ("parameter_groups",),
    "optim.lamb": ("Lamb",),
    "optim.lars": ("Lars",),
    "optim.schedule": ("warmup_constant", "warmup_cosine", "warmup_poly"),
    "parallel.layout": ("Layout",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
