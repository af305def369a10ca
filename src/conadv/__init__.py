"""Concurrent adversarial learning for large-batch training.

These are the public names; everything else may move. They are loaded when they are first used, so that
`conadv --help` does not wait for PyTorch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import load_recipe
    from .core.algorithm import ConAdv, Recycled, Vanilla
    from .core.attack import Attack
    from .core.batch import Batch, Feed
    from .core.pgd import PGD
    from .core.sam import Sam
    from .core.splitbn import plain_state_dict, route, split_batchnorm
    from .core.step import Common, Losses, Method
    from .optim.base import parameter_groups
    from .optim.lamb import Lamb
    from .optim.lars import Lars
    from .optim.muon import Muon
    from .optim.schedule import warmup_constant, warmup_cosine, warmup_poly
    from .optim.signal import SignalToNoise
    from .ranks.layout import Layout
    from .ranks.team import Team
    from .roles import Role
    from .trainer.train import train

__all__ = [
    "PGD", "Attack", "Batch", "Common", "ConAdv", "Feed", "Lamb", "Lars", "Layout", "Losses", "Method", "Muon",
    "Recycled", "Role", "Sam", "SignalToNoise", "Team", "Vanilla", "load_recipe", "parameter_groups",
    "plain_state_dict", "route", "split_batchnorm", "train", "warmup_constant", "warmup_cosine", "warmup_poly",
]  # fmt: skip
try:
    __version__ = _version("conadv")
except PackageNotFoundError:  # a copy of the source that was never installed
    __version__ = "unknown"

_HOMES = {
    "config": ("load_recipe",),
    "core.algorithm": ("ConAdv", "Recycled", "Vanilla"),
    "core.attack": ("Attack",),
    "core.batch": ("Batch", "Feed"),
    "core.pgd": ("PGD",),
    "roles": ("Role",),
    "core.sam": ("Sam",),
    "core.splitbn": ("plain_state_dict", "route", "split_batchnorm"),
    "core.step": ("Common", "Losses", "Method"),
    "optim.base": ("parameter_groups",),
    "optim.lamb": ("Lamb",),
    "optim.lars": ("Lars",),
    "optim.muon": ("Muon",),
    "optim.schedule": ("warmup_constant", "warmup_cosine", "warmup_poly"),
    "optim.signal": ("SignalToNoise",),
    "ranks.layout": ("Layout",),
    "ranks.team": ("Team",),
    "trainer.train": ("train",),
}


def __getattr__(name: str) -> Any:
    if name == "ray":  # an extra, so that it is no public name of the package itself
        return import_module(".ray", __name__)
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Let tab completion and documentation generators see the public names."""
    return [*globals(), *__all__]
