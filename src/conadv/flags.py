"""Flags of the command line, made from the fields of dataclasses: a new field needs nothing here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from cyclopts import Group, Parameter

from conadv.setting import Setting

_METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def flag(
    setting: Setting, text: str, default: str | None, group: Group | None = None, *, switch: bool = False
) -> inspect.Parameter:
    """A keyword parameter for one field, None unless its flag is given.

    Args:
        setting: the field. Its value stays text here: `Setting.parse` knows what is allowed.
        text: its help.
        default: as the help shows it; None: not shown.
        group: where the help lists it.
        switch: the flag takes no value, and makes a bool true.
    """
    limits = ", ".join(setting.choices) or setting.rule.text
    option = Parameter(
        name=setting.flag,
        help=text + (f" ({limits})" if limits else ""),
        metavar="NAME" if setting.choices else None if switch else _METAVARS[setting.kind],
        show_default=default or False,
        group=group,
        negative="",
        allow_leading_hyphen=setting.length is None,
        consume_multiple=setting.length is not None,
    )
    kind: Any = bool if switch else str if setting.length is None else list[str]
    name = setting.key.replace(".", "__")
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def with_flags(command: Callable[..., None], flags: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """The command, whose `**keywords` are replaced by these flags."""

    def with_flags(*arguments: Any, **keywords: Any) -> None:
        command(*arguments, **keywords)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    return with_flags
