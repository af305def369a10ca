"""Output for any terminal: UTF-8 where it is understood, plain ASCII in place of characters that it cannot show."""

from __future__ import annotations

import codecs
import io
import sys

_PLAIN = {
    "×": "x", "·": ".", "–": "-", "−": "-", "─": "-", "━": "-", "│": "|", "…": "...", "←": "<-", "→": "->",
    "≤": "<=", "≥": ">=", "±": "+/-", "ε": "eps", "µ": "u", "μ": "u", "√": "sqrt", "•": "*",
}  # fmt: skip
_BOXES = range(0x2500, 0x2580)


def allow_any_encoding() -> None:
    """Let standard output and error take every text; without this, a C locale makes `print` fail at the first ×."""
    codecs.register_error("conadv-plain", _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="conadv-plain")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain, error.object[error.start : error.end])), error.end


def _plain(character: str) -> str:
    return _PLAIN.get(character) or ("+" if ord(character) in _BOXES else "?")
