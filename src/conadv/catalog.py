"""The methods by name: what each does and takes, and its cost; and what the name of a model says. Loads no torch.

A new method is a class, one row here, and one row in tests/support/settings.py; one that leaves something behind for
later steps also says in ranks/member.py how ranks exchange it, and how a run resumes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from inspect import signature
from operator import or_
from typing import Any

from .roles import Role


@dataclass(frozen=True)
class MethodInfo:
    """One method as recipes and the benchmarks know it."""

    name: str
    target: str
    """Its class, as module:name within this package."""
    delay: int | None
    """Steps between generating a twin and learning from it; None: the user chooses."""
    passes: Mapping[Role, int]
    """Its duties, and how many passes over the batch each one costs: a forward pass is 1, a backward pass is 1 for the
    gradients of the activations and 1 for those of the weights."""
    maker: Role | None
    """The duty that generates twins; None: it has none."""
    layouts: tuple[str, ...]
    """How a lane can be split into ranks, from one rank to as many as possible."""

    @property
    def default_delay(self) -> int:
        """The delay unless the user chooses one; where the user may, that of the paper."""
        return 1 if self.delay is None else self.delay

    @property
    def duties(self) -> Role:
        """The duties of all ranks of a lane together."""
        return reduce(or_, self.passes)

    @property
    def work(self) -> int:
        """Passes over the batch in one step, added up over the ranks of a lane; vanilla has 3."""
        return sum(self.passes.values())

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches of BatchNorm that it learns through, unless its twins go through main."""
        return ("main", "adv") if Role.ADV in self.passes else ("main",)

    def build(self, model: Any, loss: Any, options: Mapping[str, Any], **common: Any) -> Any:
        """Make the method around a model that has the branches which the method needs. This imports torch.

        Of the options, by name, it takes those that it has; `common` is what every method takes, such as `chunk_size`.
        """
        module, _, name = self.target.partition(":")
        make = getattr(import_module(f"conadv.{module}"), name)
        known = signature(make).parameters.keys() - {"model", "loss"}
        return make(model, loss, **{name: value for name, value in options.items() if name in known}, **common)


_LEARN, _ATTACK = 3, 2
_CONADV = MethodInfo(
    name="conadv",
    target="core.algorithm:ConAdv",
    delay=None,
    passes={Role.CLEAN: _LEARN, Role.ADV: _LEARN, Role.ATTACK: _ATTACK},
    maker=Role.ATTACK,
    layouts=("clean+adv+attack", "clean | adv+attack", "clean+adv | attack", "clean | adv | attack"),
)
_ROWS = (
    MethodInfo(
        name="vanilla",
        target="core.algorithm:Vanilla",
        delay=0,
        passes={Role.CLEAN: _LEARN},
        maker=None,
        layouts=("clean",),
    ),
    replace(_CONADV, name="disadv", delay=0),
    _CONADV,
    MethodInfo(
        name="recycled",
        target="core.algorithm:Recycled",
        delay=1,
        passes={Role.CLEAN: _LEARN, Role.ADV: _LEARN},
        maker=Role.CLEAN,
        layouts=("clean+adv", "clean | adv"),
    ),
    MethodInfo(
        name="sam",
        target="core.sam:Sam",
        delay=0,
        passes={Role.CLEAN: 2 * _LEARN},
        maker=None,
        layouts=("clean",),
    ),
)
METHODS = {row.name: row for row in _ROWS}


# Libraries whose models are named as LIBRARY:NAME. Unlike package.module:callable, that imports no code of the user.
MODEL_LIBRARIES = ("timm", "torchvision")


def is_callable(model: str) -> bool:
    """Whether the name of a model is a package.module:callable, which runs code that the name's author chose."""
    library, colon, _ = model.partition(":")
    return bool(colon) and library not in MODEL_LIBRARIES


def names_dataset(path: str) -> bool:
    """Whether the path of a data set is a package.module:callable, which runs code; hf:NAME runs none."""
    module, colon, name = path.partition(":")
    return bool(colon) and module != "hf" and all(word.isidentifier() for word in f"{module}.{name}".split("."))
