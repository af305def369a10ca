"""The optimizers by name: the class of each, and which fields of a recipe it takes. Loads no torch.

A new optimizer is its own file, or a class of another library, and one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class OptimizerInfo:
    """One optimizer as recipes know it."""

    name: str
    target: str
    """Its class, as module:name."""
    takes: tuple[str, ...] = ()
    """The fields of `[optimizer]` that its class takes by the same names, besides `lr` and `weight_decay`."""

    def build(self, model: Any, settings: Mapping[str, Any]) -> Any:
        """Make the optimizer of a model's parameters. This imports torch.

        Args:
            model: a network, with the BatchNorm branches that it is trained with.
            settings: `lr`, `weight_decay` and what else the optimizer takes, by the names of the fields.
        """
        from .groups import parameter_groups

        module, _, name = self.target.partition(":")
        groups = parameter_groups(model, settings["weight_decay"])
        return getattr(import_module(module), name)(
            groups, settings["lr"], **{field: settings[field] for field in self.takes}
        )


_ROWS = (
    OptimizerInfo("lars", "conadv.optim.lars:Lars", ("momentum",)),
    OptimizerInfo("sgd", "torch.optim:SGD", ("momentum",)),
    OptimizerInfo("adamw", "torch.optim:AdamW"),
    OptimizerInfo("lamb", "conadv.optim.lamb:Lamb"),
    OptimizerInfo("muon", "conadv.optim.muon:Muon", ("momentum",)),
)
OPTIMIZERS = {row.name: row for row in _ROWS}
