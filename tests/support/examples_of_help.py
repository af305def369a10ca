"""The examples that a help text gives: what follows "such as", up to the end of the clause."""

from __future__ import annotations

import re
import shlex

_EXAMPLE = re.compile(r"""such as ((?:"[^"]*"|[^\s"]+)(?: (?!or |and |with )(?:"[^"]*"|[^\s"]+))*)""")


def examples(text: str) -> list[list[str]]:
    """Each example as the words that a shell would hand on."""
    found = []
    for match in _EXAMPLE.finditer(text):
        clause = re.split(r"[.,:;)](?: |$)", match[1] + " ")[0]
        found.append(shlex.split(clause))
    return found
