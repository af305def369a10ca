"""Mutation testing: change one operator or number of the source at a time; the tests of its part must fail.

    python tests/mutants.py --seed 0 --count 40 [--part core] [--minutes 4] [--state FILE]

A mutant that all tests pass is a survivor: printed as a diff, to be killed by a test or argued to be equivalent. Tests
run in a forked process that has imported PyTorch already, against a copy of the source with the one change.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
# What is run against a mutant of each part, the quickest first.
TESTS = {
    "optim": ["optim"],
    "core": ["core", "contracts/test_reference.py", "contracts/test_ball.py", "contracts/test_no_trace.py"],
    "parallel": ["parallel", "contracts/test_layout_promise.py"],
    "trainer": ["trainer", "contracts/test_resume.py"],
}
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
LIMIT = 150.0  # seconds for the tests of one mutant; a mutant that hangs is noticed


class Mutant:
    """One change in one file."""

    def __init__(self, path: Path, tree: ast.Module, place: int) -> None:
        self.path = path
        self._tree = copy.deepcopy(tree)
        node = list(_nodes(self._tree))[place]
        self.line = getattr(node, "lineno", 0)
        before = ast.unparse(node)
        _change(node)
        self.name = f"{path}:{self.line}: {before}  ->  {ast.unparse(node)}"

    def source(self) -> str:
        return ast.unparse(self._tree)


def _nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Whatever can be changed, but for text, annotations and what only speaks to people."""
    skipped = {id(part) for node in ast.walk(tree) for part in _silent(node)}
    for node in ast.walk(tree):
        if id(node) not in skipped and _can_change(node):
            yield node


def _silent(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            yield from ast.walk(node)
        case ast.AnnAssign():
            yield from ast.walk(node.annotation)
        case ast.FunctionDef():
            for argument in (*node.args.args, *node.args.kwonlyargs):
                if argument.annotation:
                    yield from ast.walk(argument.annotation)
            if node.returns:
                yield from ast.walk(node.returns)


def _can_change(node: ast.AST) -> bool:
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            return type(node.op) in OPERATORS
        case ast.Compare():
            return type(node.ops[0]) in OPERATORS
        case ast.Constant():
            return type(node.value) in (int, float, bool)
        case ast.UnaryOp():
            return isinstance(node.op, ast.Not | ast.USub)
    return False


def _change(node: ast.AST) -> None:
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            node.op = OPERATORS[type(node.op)]()  # type: ignore[assignment]
        case ast.Compare():
            node.ops[0] = OPERATORS[type(node.ops[0])]()  # type: ignore[call-overload]
        case ast.Constant():
            node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
        case ast.UnaryOp():
            node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
            if isinstance(node.op, ast.Not):
                node.operand = ast.UnaryOp(ast.Not(), node.operand)


def mutants(part: str, seed: int) -> Iterator[Mutant]:
    """All mutants of a part, in the order of a seed."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((SOURCE / "conadv" / part).rglob("*.py"))}
    places = [(path, place) for path, tree in trees.items() for place, _ in enumerate(_nodes(tree))]
    Random(seed).shuffle(places)
    for path, place in places:
        yield Mutant(path.relative_to(SOURCE), trees[path], place)


def is_killed(mutant: Mutant, part: str) -> bool:
    """Whether some test of the part fails, dies or hangs."""
    with tempfile.TemporaryDirectory(prefix="conadv-mutant-") as folder:
        shutil.copytree(SOURCE, Path(folder) / "src")
        (Path(folder) / "src" / mutant.path).write_text(mutant.source())
        child = os.fork()
        if child == 0:
            os.setsid()
            _test(Path(folder) / "src", part)
        return _status(child) != 0


def _test(source: Path, part: str) -> None:
    os.environ["PYTHONPATH"] = str(source)
    sys.path.insert(0, str(source))
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    import pytest

    words = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *(str(ROOT / "tests" / name) for name in TESTS[part])]
    os._exit(int(pytest.main(words)))


def _status(child: int) -> int:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="mutants of each part")
    parser.add_argument("--part", choices=TESTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after this time")
    parser.add_argument("--state", type=Path, help="a file that keeps what is known from call to call")
    options = parser.parse_args()
    import hypothesis  # noqa: F401 - what takes seconds to import, for all children
    import torch._dynamo  # noqa: F401

    known: dict[str, bool] = json.loads(options.state.read_text()) if options.state and options.state.exists() else {}
    end = time.monotonic() + 60 * options.minutes
    for part in options.part or TESTS:
        for mutant, _ in zip(mutants(part, options.seed), range(options.count), strict=False):
            if mutant.name in known or time.monotonic() > end:
                continue
            known[mutant.name] = is_killed(mutant, part)
            print(f"{'killed  ' if known[mutant.name] else 'SURVIVED'}  {mutant.name}", flush=True)
            if options.state:
                options.state.write_text(json.dumps(known, indent=1))
    print(f"{sum(known.values())} of {len(known)} mutants killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
