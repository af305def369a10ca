"""Flags for the fields of a recipe; a new field needs no change here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cyclopts import Group

from conadv import config
from conadv.flags import flag, with_flags

# A value of a recipe as a flag gives it.
Field = bool | str | list[str]


def with_fields(command: Callable[..., None], defaults: Mapping[str, str]) -> Callable[..., None]:
    """The command with its `**fields` replaced by one flag for each of these fields of a recipe, by dotted key."""
    settings = config.settings()
    whole = len(defaults) == len(settings)
    return with_flags(
        command,
        (
            flag(settings[key], config.description(key), default, _group(key.rpartition(".")[0], whole))
            for key, default in defaults.items()
        ),
    )


def dotted(fields: Mapping[str, Field]) -> dict[str, Field]:
    """The values of these flags by dotted key."""
    return {name.replace("__", "."): text for name, text in fields.items()}


def _group(table: str, whole: bool) -> Group:
    """Where the help lists the flags of a table: after the command's own, in the order of the recipe."""
    tables = list(config.TABLES)
    if not table:
        text = _one_line(config.Recipe.__doc__) if whole else "What may differ from the recipe of the run."
        return Group("Recipe", help=text, sort_key=1)
    return Group(f"Recipe: {table}", help=_one_line(config.TABLES[table].__doc__), sort_key=2 + tables.index(table))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
