"""Concurrent adversarial learning: large-batch training that keeps its accuracy.

These are the public names; everything else may move.
"""

from .core.attack import PGD
from .core.learner import Losses
from .core.methods import ConAdv, Method, Recycled, Vanilla
from .core.roles import Place, Role
from .core.splitbn import plain_state_dict, route, split_batchnorm

__all__ = [
    "PGD",
    "ConAdv",
    "Losses",
    "Method",
    "Place",
    "Recycled",
    "Role",
    "Vanilla",
    "plain_state_dict",
    "route",
    "split_batchnorm",
]
__version__ = "0.1.0"
