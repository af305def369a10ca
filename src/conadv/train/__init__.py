"""A run: built from a recipe, trained, saved and resumed.

The package is also the function `conadv.train(recipe)`: see `conadv.train.api.train`.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called, since the package and the public function have the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from .api import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
