"""Flags of the command line, for commands and for the fields of dataclasses; a new field needs no change here."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from conadv.setting import Setting, show

_METAVARS = {int: "N", float: "X", str: "TEXT"}
_OPPOSITE = {"true": "false", "false": "true"}


def option(
    text: str, metavar: str | None = None, default: str | None = None, names: tuple[str, ...] | None = None
) -> Parameter:
    """A flag of a command.

    Args:
        text: its help.
        metavar: what the help calls its value.
        default: as the help shows it; None: not shown.
        names: its names, if not that of the parameter.
    """
    return Parameter(
        name=names, help=text, metavar=metavar, show_default=default or False, negative="", allow_leading_hyphen=True
    )


Json = Annotated[bool, option("Print one JSON object on standard output, and nothing else there.")]


def flag(setting: Setting, text: str, default: str | None, group: Group) -> inspect.Parameter:
    """A keyword parameter for one field, None unless its flag is given.

    Args:
        setting: the field. A value that is not a bool stays text here: `Setting.parse` knows what is allowed.
        text: its help.
        default: as the help shows it; None: not shown.
        group: where the help lists it.
    """
    limits = ", ".join(setting.choices) or setting.rule.text
    option = Parameter(
        name=setting.flag,
        help=text + (f" ({limits})" if limits else ""),
        metavar="NAME" if setting.choices else _METAVARS.get(setting.kind),
        show_default=default or False,
        group=group,
        negative="--no-" + setting.flag[2:] if setting.kind is bool else "",
        allow_leading_hyphen=setting.length is None,
        consume_multiple=setting.length is not None,
    )
    kind: Any = bool if setting.kind is bool else str if setting.length is None else list[str]
    name = setting.key.replace(".", "__")
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def with_flags(command: Callable[..., None], flags: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """The command with its `**keywords` replaced by these flags."""

    def with_flags(*arguments: Any, **keywords: Any) -> None:
        command(*arguments, **keywords)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
    return with_flags


def spell_out(app: App, words: Sequence[str], is_argument: Callable[[str], bool]) -> list[str]:
    """Write out the value of each boolean flag, and check that every other flag has one.

    --compile and --compile true become --compile=true, and --no-compile becomes --compile=false.

    Args:
        app: the commands.
        words: of the command line.
        is_argument: whether a word after a boolean field is an argument of the command, such as the name of a recipe.
    """
    _, (*_, command), _ = app.parse_commands(words)
    if command.default_command is None or not {*app.help_flags, *app.version_flags}.isdisjoint(words):
        return list(words)
    flags = {name: one for one in command.assemble_argument_collection() for name in one.names if name[0] == "-"}
    rest, found = deque(words), list[str]()
    while rest and rest[0] != "--":
        word = rest.popleft()
        name, equals, value = word.partition("=")
        flag, follows = flags.get(name), rest[0] if rest and not equals else ""
        if flag and flag.hint in (bool, bool | None):
            is_field = flag.hint is not bool
            if follows.lower() in _OPPOSITE or (is_field and follows[:1] not in ("", "-") and not is_argument(follows)):
                equals, value = "=", rest.popleft()
            found.append(f"{flag.names[0]}={_boolean(name, value if equals else 'true', name in flag.negatives)}")
        elif flag is None or equals:
            found.append(word)
        elif not rest or follows in flags or follows.startswith("--"):
            raise ValueError(f"{name} needs a value, but {show(follows) if rest else 'nothing'} follows it")
        else:
            found += [word, rest.popleft()]
    return [*found, *rest]


def _boolean(name: str, value: str, negated: bool) -> str:
    if value.lower() not in _OPPOSITE:
        raise ValueError(f"{name} is {show(value)} but must be true or false; without a value it is true")
    return _OPPOSITE[value.lower()] if negated else value.lower()
