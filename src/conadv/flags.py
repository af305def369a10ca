"""Flags of the command line: of commands, and of the fields of dataclasses, where a new field needs nothing here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any

from cyclopts import Group, Parameter

from conadv.setting import Setting, descriptions, settings_of

_METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


def option(
    text: str, metavar: str | None = None, default: str | None = None, names: tuple[str, ...] | None = None
) -> Parameter:
    """A flag of a command.

    Args:
        text: its help.
        metavar: what the help calls its value.
        default: as the help shows it; None: not shown.
        names: if it has others than that of its parameter.
    """
    return Parameter(
        name=names, help=text, metavar=metavar, show_default=default or False, negative="", allow_leading_hyphen=True
    )


Json = Annotated[bool, option("Print one JSON object on standard output, and nothing else there.")]


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


def flags_of(table: type[Any], groups: Mapping[str, str] | None = None) -> Iterator[inspect.Parameter]:
    """A flag for each field of a dataclass; the text below a field is its help.

    Args:
        table: the dataclass.
        groups: titles of groups in the help, by the first field of each.
    """
    own: type = table
    texts, defaults = descriptions(table.__module__), {field.name: field.default for field in fields(table)}
    titles, group = dict(groups or {}), None
    for setting in settings_of(own):
        name = setting.key
        if name in titles:
            group = Group(titles[name], sort_key=1 + list(titles).index(name))
        text, default = texts[f"{table.__name__}.{name}"], _shown(defaults[name])
        yield flag(setting, text, default, group, switch=setting.kind is bool)


def parse_flags(table: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those flags of a dataclass that were given."""
    own: type = table
    settings = {setting.key: setting for setting in settings_of(own)}
    known = {name: value for name, value in given.items() if value is not None}
    return {name: value if value is True else settings[name].parse(value) for name, value in known.items()}


def _shown(default: Any) -> str | None:
    """A default as one would write it after the flag."""
    if default is None or default is False or default == ():
        return None
    items = default if isinstance(default, tuple) else (default,)
    return " ".join(f'"{item}"' if " " in str(item) else str(item) for item in items)
