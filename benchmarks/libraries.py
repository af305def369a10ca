"""Other libraries to compare with: development extras, so each may be absent."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType


def load(name: str) -> ModuleType | None:
    """The library, or None where it is not installed."""
    with warnings.catch_warnings():  # foolbox imports from where scipy has moved things away from
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # it is there, but broken
                raise
            return None


def absence(name: str) -> str:
    """The note where its rows are left out."""
    return f"without {name}, which is not installed: pip install {name} adds the rows that compare with it"
