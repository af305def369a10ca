"""How the text of a flag or a file becomes the value of a field: numbers, fractions, shares, names and "none"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, get_args

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from conadv.sinks import SINKS

_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp64": "float64", "double": "float64"}


def show(value: object) -> str:
    """Return a value as an error message quotes it: on one line, and not too long."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:80]}...{text[-70:]}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message that names the most similar known name, if there is one."""
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def spell(value: object) -> str:
    """Return the shortest exact spelling of a value: 24/255 as a fraction, 0.8 (which is 204/255) as it is."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case float():
            level = round(min(abs(value), 1.0) * 255)
            return min(repr(value), f"{level}/255", key=len) if level / 255 == value else repr(value)
        case tuple():
            return ",".join(value) or "none"
    return str(value)


def _or_none(read: Callable[[Any, Sequence[Token]], Any]) -> Callable[[Any, Sequence[Token]], Any]:
    return lambda hint, tokens: None if tokens[0].value.lower() == "none" else read(hint, tokens)


def _number(hint: Any, tokens: Sequence[Token]) -> float:
    """Read a whole number or, where the field is a float, any finite number or a fraction such as 4/255."""
    text = tokens[0].value
    if hint is int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{show(text)} is not a whole number") from None
    try:
        above, slash, below = text.partition("/")
        value = float(above) / float(below) if slash else float(text)
    except (ValueError, ArithmeticError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{show(text)} is not a number, such as 0.5 or 4/255")
    return value


def _text(hint: Any, tokens: Sequence[Token]) -> str:
    """Read a text that can be written as UTF-8: file names that are not UTF-8 have surrogates."""
    text = tokens[0].value
    if not text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{show(text)} is empty or not UTF-8")
    return text


def _epochs(hint: Any, tokens: Sequence[Token]) -> float | str:
    """Read a number of epochs, or a share of the run in its canonical form: "30%"."""
    text = tokens[0].value
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 <= number <= (100 if text.endswith("%") else 1e6):
        raise ValueError(f"{show(text)} is neither a number of epochs, such as 5, nor a share from 0% to 100%")
    return f"{abs(number)!r}".removesuffix(".0") + "%" if text.endswith("%") else number


def _precision(hint: Any, tokens: Sequence[Token]) -> str:
    name = _PRECISIONS.get(tokens[0].value, tokens[0].value)
    if name not in get_args(hint):
        half = name in ("fp16", "float16", "half")
        advice = "; bf16 takes as little memory and needs no scaling of the loss" if half else ""
        raise ValueError(f"{show(name)} is not one of float32, bfloat16 (or bf16) and float64{advice}")
    return name


def _sinks(hint: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    names = tuple(name for token in tokens for name in token.value.split(",") if name != "none")
    for name in names:
        if name not in SINKS:
            raise ValueError(f"{show(name)} is not one of {', '.join(SINKS)}{did_you_mean(name, list(SINKS))}")
    return names


def _switch_or_path(hint: Any, tokens: Sequence[Token]) -> bool | str:
    text = tokens[0].value
    known = {"true": True, "false": False}.get(text.lower())
    return text if known is None else known


def check_fraction(name: str, value: float | None) -> None:
    """Refuse a size above the pixel range with a hint at the fraction that was probably meant."""
    if value is not None and value > 1:
        advice = f"; did you mean {value:g}/255?" if value <= 255 else ""
        raise ValueError(f"{name} {value:g}: it is a fraction of the pixel range, from 0 to 1{advice}")


def number(none: bool = False, **bounds: float) -> Parameter:
    """Return how a number is read, or none if that is allowed.

    `gt`, `gte`, `lt` and `lte` bound it. Every number has a bound, so that no product of a few of them overflows a
    float32 or an int64.
    """
    if none:
        return Parameter(converter=_or_none(_number), validator=Number(**bounds))
    return Parameter(converter=_number, validator=Number(**bounds), show_default=spell)


def switch(name: str) -> Parameter:
    """Return how a field that is on or off is read: --NAME, --no-NAME, or --NAME=true."""
    return Parameter(negative=f"--no-{name}", show_default=False)


Count = Annotated[int, number(gte=1, lte=10**12)]
Whole = Annotated[int, number(gte=0, lte=10**12)]
Positive = Annotated[float, number(gt=0, lte=1e6)]
NotNegative = Annotated[float, number(gte=0, lte=1e6)]
Share = Annotated[float, number(gte=0, lte=1)]
PositiveShare = Annotated[float, number(gt=0, lte=1)]
BelowOne = Annotated[float, number(gte=0, lt=1)]
Text = Annotated[str, Parameter(converter=_text)]
OptionalText = Annotated[str | None, Parameter(converter=_or_none(_text))]
Epochs = Annotated[float | str, Parameter(converter=_epochs)]
Precision = Parameter(converter=_precision)
Sinks = Parameter(converter=_sinks, negative="", show_default=False)
SwitchOrPath = Parameter(converter=_switch_or_path, negative="", n_tokens=1, show_default=False)
