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
    takes: Mapping[str, str | tuple[str, ...]]
    """Arguments of the class besides the parameter groups and `lr`, each with the field or fields of `[optimizer]` that
    it comes from. A field that is None is left to the default of the class."""

    def build(self, model: Any, settings: Mapping[str, Any]) -> Any:
        """Make the optimizer of a model's parameters. This imports torch.

        Args:
            model: a network, with the BatchNorm branches that it is trained with.
            settings: `lr`, `weight_decay` and what else the optimizer takes, by the names of the fields.
        """
        from .groups import parameter_groups

        module, _, name = self.target.partition(":")
        groups = parameter_groups(model, settings["weight_decay"])
        return getattr(import_module(module), name)(groups, settings["lr"], **self._arguments(settings))

    def _arguments(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = {
            argument: settings[fields] if isinstance(fields, str) else tuple(settings[field] for field in fields)
            for argument, fields in self.takes.items()
        }
        return {argument: value for argument, value in values.items() if value is not None}


_ADAM: dict[str, str | tuple[str, ...]] = {"betas": ("beta1", "beta2"), "eps": "eps"}

_ROWS = (
    OptimizerInfo("lars", "conadv.optim.lars:Lars", {"momentum": "momentum", "trust_coefficient": "trust_coefficient"}),
    OptimizerInfo("sgd", "torch.optim:SGD", {"momentum": "momentum"}),
    OptimizerInfo("adamw", "torch.optim:AdamW", _ADAM),
    OptimizerInfo("lamb", "conadv.optim.lamb:Lamb", _ADAM),
    OptimizerInfo("muon", "conadv.optim.muon:Muon", {"momentum": "momentum", **_ADAM}),
)
OPTIMIZERS = {row.name: row for row in _ROWS}
