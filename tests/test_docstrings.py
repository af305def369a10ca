"""Every argument of every public class and function is explained in its docstring."""

import inspect
import re

import pytest

import conadv

# Protocols and results, which nobody constructs, and enumerations.
NOT_CALLED = {"Attack", "Method", "Losses", "Role", "Common"}


def explained(text: str) -> set[str]:
    """The names in the Args section of a docstring."""
    section = re.search(r"Args:\n(.*?)(?:\n\n\s*\w+:\n|\Z)", text, re.DOTALL)
    return set(re.findall(r"^\s+\**(\w+): \S", section[1], re.MULTILINE)) if section else set()


@pytest.mark.parametrize("name", sorted(set(conadv.__all__) - NOT_CALLED))
def test_every_argument_is_explained(name):
    public = getattr(conadv, name)
    parameters = {parameter for parameter in inspect.signature(public).parameters if not parameter.startswith("_")}
    assert parameters <= explained(inspect.getdoc(public) or ""), f"{name} does not explain all of {parameters}"
