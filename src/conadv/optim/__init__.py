"""The optimizers by name. Loads no torch.

A new optimizer is its own file, or a class of another library, and one row in each table.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any

OPTIMIZERS = {
    "lars": "conadv.optim.lars:Lars",
    "sgd": "torch.optim:SGD",
    "adamw": "torch.optim:AdamW",
    "lamb": "conadv.optim.lamb:Lamb",
    "muon": "conadv.optim.muon:Muon",
}
# Peak learning rates of recipes that have none. That of LARS is the authors' for batches below 16k.
RATES = {"lars": 10.0, "sgd": 0.1, "adamw": 0.001, "lamb": 0.02, "muon": 0.02}


def build_optimizer(model: Any, settings: Mapping[str, Any]) -> Any:
    """Make the optimizer of a model, which has its BatchNorm branches already. This imports torch.

    Args:
        model: a network.
        settings: the fields of `[optimizer]`; those that the class does not take are left out.
    """
    from .base import parameter_groups

    module, _, name = OPTIMIZERS[settings["name"]].partition(":")
    make = getattr(import_module(module), name)
    taken = {field: value for field, value in settings.items() if field in signature(make).parameters}
    return make(parameter_groups(model, settings["weight_decay"]), **taken)
