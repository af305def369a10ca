"""One field of a dataclass as users set it, in Python, TOML or a flag: what is allowed, its help, and its errors."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

Scalar = int | float | str | bool | None
Value = Scalar | tuple[Scalar, ...]


class Rule(NamedTuple):
    """What a value must be beyond its type."""

    text: str
    holds: Callable[[Any], bool]


class OneOf(NamedTuple):
    """The only texts that a value may be, where they come from a table."""

    choices: tuple[str, ...]


def within(low: float, high: float) -> Rule:
    """The rule of a number from `low` to `high`, both included."""
    first, last = (re.sub(r"e([+-])0*", lambda sign: f"e{sign[1].strip('+')}", f"{end:g}") for end in (low, high))
    return Rule(f"from {first} to {last}", lambda value: low <= value <= high)


# Every number has a bound, so that no product of a few of them overflows a float32 or an int64.
Count = Annotated[int, within(1, 1e12)]
Whole = Annotated[int, within(0, 1e12)]
Seed = Annotated[int, Rule("0 or more and below 2^63", lambda value: 0 <= value < 2**63)]
Positive = Annotated[float, Rule("above 0 and at most 1e6", lambda value: 0 < value <= 1e6)]
NotNegative = Annotated[float, within(0, 1e6)]
Share = Annotated[float, within(0, 1)]
PositiveShare = Annotated[float, Rule("above 0 and at most 1", lambda value: 0 < value <= 1)]
BelowOne = Annotated[float, Rule("0 or more and below 1", lambda value: 0 <= value < 1)]
# A number, or a share of something in percent as a text: "30%".
NumberOrPercent = Annotated[float | str, within(0, 1e6)]

_ANYTHING = Rule("", lambda value: True)
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Setting:
    """A field by its dotted key, such as attack.epsilon."""

    key: str
    kind: type
    """int, float, bool or str."""
    choices: tuple[str, ...]
    """The only texts that are allowed; empty: any."""
    rule: Rule
    optional: bool
    """Whether None is allowed, which TOML and flags write as none."""
    length: int | None = None
    """The length of a tuple (0: any length), whose items the other fields describe; None: not a tuple."""
    percent: bool = False
    """Whether a share from 0% to 100% is allowed instead of a number; it stays a string."""

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def wanted(self) -> str:
        """What is allowed, for error messages."""
        words = f"one of {', '.join(self.choices)}" if self.choices else f"{_KINDS[self.kind]}, {self.rule.text}"
        words = words.removesuffix(", ") + (", or a share from 0% to 100%" if self.percent else "")
        return words + (", or none" if self.optional else "")

    def parse(self, text: str | Sequence[str]) -> Value:
        """The value that a flag writes as text; for a tuple, one text per item, or several separated by commas."""
        if self.length is None or text in ("none", ["none"]):
            return self.check(self._read(text if isinstance(text, str) else text[0]))
        texts = [text] if isinstance(text, str) else text
        return self.check([self._read(item) for part in texts for item in part.split(",")])

    def check(self, value: Any) -> Value:
        """The value in its canonical form (a float field holds a float); ValueError, with the flag, if not allowed."""
        if self.optional and (value is None or value == "none"):
            return None
        if self.length is not None:
            return self._check_items(value)
        if self.percent and (share := _percent(value)) is not None:
            return share
        if value == "bf16" and "bfloat16" in self.choices:
            return "bfloat16"
        form = _number(value) if self.kind is float else value
        if type(form) is not self.kind or not self._allows(form):
            wrong = f"{self.key} is {show(value)} but must be {self.wanted}: change {self.flag}"
            raise ValueError(wrong + did_you_mean(value, self.choices) + self._levels(form))
        return cast(Value, form)

    def _levels(self, value: object) -> str:
        """A hint for a radius that was given in grey levels instead of as a fraction of the pixel range."""
        in_levels = self.key.endswith("epsilon") and isinstance(value, float) and 1 < value <= 255
        return f"; did you mean {value:g}/255?" if in_levels else ""

    def _check_items(self, value: Any) -> Value:
        items = value if isinstance(value, list | tuple) else (value,)
        if self.length and len(items) != self.length:
            raise ValueError(f"{self.key} is {show(value)} but must be {self.length} values: change {self.flag}")
        item = replace(self, length=None, optional=False)
        return cast(Value, tuple(item.check(part) for part in items))

    def _read(self, text: str) -> object:
        if self.kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            return self.kind(text)
        except ValueError:
            return text  # none or a fraction, or refused by check

    def _allows(self, value: Any) -> bool:
        if self.kind is str:
            return value in self.choices if self.choices else _is_text(value)
        return (self.kind is not float or math.isfinite(value)) and self.rule.holds(value)


@cache
def settings_of(table: type[Any], prefix: str = "") -> tuple[Setting, ...]:
    """The settings of a dataclass in the order of its fields, without those that are tables themselves."""
    hints = get_type_hints(table, include_extras=True)
    return tuple(
        _setting(prefix + field.name, hints[field.name])
        for field in fields(table)
        if not is_dataclass(hints[field.name])
    )


def normalise(table: object, prefix: str = "") -> None:
    """Check every setting of a frozen dataclass in `__post_init__`, and replace it by its canonical form."""
    own: type = type(table)
    for setting in settings_of(own, prefix):
        name = setting.key.removeprefix(prefix)
        object.__setattr__(table, name, setting.check(getattr(table, name)))


@cache
def descriptions(module: str) -> dict[str, str]:
    """The text under each field of a module's dataclasses, by Class.field, on one line."""
    texts = {}
    source = ast.parse(inspect.getsource(sys.modules[module]))
    for table in (statement for statement in source.body if isinstance(statement, ast.ClassDef)):
        for field, below in pairwise(table.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[f"{table.name}.{name}"] = " ".join(text.split())
    return texts


def show(value: object) -> str:
    """A value as an error message quotes it: on one line and not too long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists without end
        return "too large to show"
    return text if len(text) <= 160 else f"{text[:80]}...{text[-70:]}"


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """The end of an error message: the most similar known name, if there is one."""
    nearest = difflib.get_close_matches(value, known, 1) if isinstance(value, str) else []
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _setting(key: str, hint: Any) -> Setting:
    parts = get_args(hint)
    optional = NoneType in parts
    if optional:
        (hint,) = (part for part in parts if part is not NoneType)
    if get_origin(hint) is tuple:
        items = get_args(hint)
        length = 0 if items[-1] is Ellipsis else len(items)
        return replace(_setting(key, items[0]), optional=optional, length=length)
    if get_origin(hint) is Literal:
        return Setting(key, str, get_args(hint), _ANYTHING, optional)
    if get_origin(hint) is Annotated:
        kind, rule = get_args(hint)
        if kind == float | str:
            return Setting(key, float, (), rule, optional, percent=True)
        choices = rule.choices if isinstance(rule, OneOf) else ()
        return Setting(key, kind, choices, _ANYTHING if choices else rule, optional)
    return Setting(key, hint, (), _ANYTHING, optional)


def _number(value: Any) -> Any:
    """Whole numbers and fractions such as "4/255" as floats; anything else as it is."""
    try:
        match value:
            case int() if type(value) is int:
                return float(value)
            case str() if value.count("/") == 1:
                above, below = value.split("/")
                return float(above) / float(below)
    except (ValueError, ArithmeticError):
        return value
    return value


def _percent(value: Any) -> str | None:
    """A share such as "30%" in its canonical form; None: the value is not a share."""
    try:
        number = float(value[:-1]) if isinstance(value, str) and value.endswith("%") else math.nan
    except ValueError:
        return None
    return f"{abs(number)!r}".removesuffix(".0") + "%" if 0 <= number <= 100 else None


def _is_text(value: str) -> bool:
    """Whether a string is not empty and can be written as UTF-8: file names that are not UTF-8 have surrogates."""
    return value != "" and not any("\ud800" <= character <= "\udfff" for character in value)
