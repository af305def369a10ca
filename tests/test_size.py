"""Functions stay small: half of them have at most 8 lines, and none more than 60. A class name means one thing."""

import ast
from collections import Counter
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src"


def function_lengths() -> dict[str, int]:
    """Lines of each function of the source, its docstring included, by where it is."""
    return {
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_functions_are_small() -> None:
    lengths = function_lengths()
    assert median(lengths.values()) <= 8
    assert not {where: length for where, length in lengths.items() if length > 60}


def test_no_two_classes_have_one_name() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}
