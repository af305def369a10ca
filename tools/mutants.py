"""Mutation testing: change one operator or number of the source at a time; a test must fail.

    python tools/mutants.py --state FOLDER [--seed 0] [--count 40] [--part core] [--minutes 4]
    python tools/mutants.py --state FOLDER --part core --only pgd.py:94 --tests tests/core/test_pgd.py

tests of a part, traced once ──► lines that each test executes, its cost ──► for each mutant: tests of its line, those
                                                                            of many functions first, until one fails

A mutant that all of them pass is a survivor, to be killed by a test or argued to be equivalent. `--tests` traces
nothing and runs the tests that it names, against mutants of the sample that no test has killed so far. Tests run in a
forked process that has imported PyTorch already, against a copy of the source with the one change. FOLDER keeps what
is known from call to call: take another after a change.
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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
# Where the tests of a part are; those that take long are traced for no line, but run for the files that only they test.
TESTS = {
    "optim": ["optim"],
    "task": ["task"],
    "core": [
        "core",
        *(f"contracts/test_{name}.py" for name in ["reference", "ball", "no_trace", "resume", "layout_promise"]),
    ],
    "ranks": ["ranks"],
    "trainer": ["trainer"],
    "study": ["study"],
}
COSTLY = {
    "core/test_launches.py": [],
    "core/test_splitbn_checkpointing.py": [],
    "core/test_splitbn_compile.py": [],
    "core/test_splitbn_kinds.py": ["core/branches.py", "core/splitbn.py"],
    "core/test_wrappers.py": [],
    "core/test_methods_ddp.py": [],
    "ranks/test_rehearsal.py": [],
    "ranks/test_team.py": ["ranks/mail.py", "ranks/member.py", "ranks/team.py"],
    "ranks/test_mail.py": ["ranks/mail.py", "ranks/member.py", "ranks/world.py"],
    "ranks/test_watch.py": ["ranks/faults.py"],
    "trainer/test_bad_input.py": [],
    "trainer/test_compiling.py": ["trainer/kernels.py"],
    "trainer/test_elastic.py": [],
    "trainer/test_index.py": [],
    "trainer/test_stop.py": ["trainer/stop.py"],
    "trainer/test_slurm.py": [],
    "trainer/test_torchrun.py": [],
    "trainer/test_waits.py": [],
}
# What takes seconds to import, once for all children; nothing of ours.
IMPORTS = ("torch._dynamo", "torch.utils.data", "numpy.random", "safetensors.torch", "cyclopts")
IMPORTS += ("pytest", "hypothesis", "PIL.Image", "tensorboardX")
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
# For one mutant: so many tests, so many seconds of a processor as they took when they were traced, and so many seconds
# until it is taken for one that hangs. A single test that took longer than LONGEST is left out.
MOST, BUDGET, LIMIT, LONGEST = 100, 15.0, 600.0, 30.0
TIMEOUT = 200  # seconds of one test: a busy machine is no failure


class Mutant:
    """One change in one file."""

    def __init__(self, path: Path, tree: ast.Module, place: int) -> None:
        self.path = path
        self._tree = copy.deepcopy(tree)
        node = list(_nodes(self._tree))[place]
        self.lines = _lines(self._tree, node)
        before = ast.unparse(node)
        _change(node)
        self.name = f"{path}:{self.lines[-1]}: {before}  ->  {ast.unparse(node)} ({place})"

    def source(self) -> str:
        return ast.unparse(self._tree)


def _lines(tree: ast.Module, node: Any) -> range:
    """From the start of the statement that has a node to the line of the node."""
    around = [found for found in ast.walk(tree) if isinstance(found, ast.stmt) and node in ast.walk(found)]
    return range(min(node.lineno, max(found.lineno for found in around)), node.lineno + 1)


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


Place = tuple[Path, ast.Module, int]


def places(part: str, seed: int) -> list[Place]:
    """What can be changed in a part, in the order of a seed."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((SOURCE / "conadv" / part).rglob("*.py"))}
    found = [
        (path.relative_to(SOURCE), tree, place) for path, tree in trees.items() for place, _ in enumerate(_nodes(tree))
    ]
    Random(seed).shuffle(found)
    return found


class Covering:
    """Which tests execute a line, from one traced run of all tests of a part."""

    def __init__(self, part: str, folder: Path) -> None:
        traces = folder / part
        if not traces.exists():
            (unfinished := folder / f"{part}.unfinished").mkdir(parents=True)
            words = [str(ROOT / "tests" / name) for name in TESTS[part]]
            words += [f"--ignore={ROOT / 'tests' / name}" for name in COSTLY]
            settings = {"CONADV_COVERING": str(unfinished), "CONADV_RANKS": "fork"}
            with copied() as source:  # as a mutant is, so that a test that fails in a copy kills none
                failed = _forked(source, ["-p", "support.covering", *words], settings, limit=1e5)
            (unfinished / "failed").write_text(failed)
            unfinished.rename(traces)
        self._costs: dict[str, float] = defaultdict(float)
        self._tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        useless = set((traces / "failed").read_text().splitlines())
        for path in traces.glob("*.jsonl"):
            for record in map(json.loads, path.read_text().splitlines()):
                self._costs[record["test"]] += record["seconds"]
                useless |= {record["test"]} if record["wall"] > LONGEST else set()
                for file, lines in record["lines"].items():
                    for line in (0, *lines):  # 0: any line of the file
                        self._tests[file, line].add(record["test"])
        for test in useless:
            self._costs[test] = float("inf")

    def choose(self, mutant: Mutant) -> list[str]:
        """Tests of the line or, where it is executed at import, of the file; else those of its name.

        Of each test function the cheapest case comes first, and those of the file's own tests before others: cases of
        one function tend to notice the same.
        """
        file = str(mutant.path.relative_to("conadv"))
        own = f"{mutant.path.parent.name}/test_{mutant.path.stem}.py"
        found = set().union(*(self._tests.get((file, line), set()) for line in mutant.lines))
        cases: Counter[str] = Counter()
        order: list[tuple[int, bool, float, str]] = []
        for test in sorted(found or self._tests.get((file, 0), set()), key=lambda test: self._costs[test]):
            function = test.partition("[")[0]
            order.append((cases[function], own not in test, self._costs[test], test))
            cases[function] += 1
        chosen: list[str] = []
        spent = 0.0
        for *_, cost, test in sorted(order):
            if len(chosen) < MOST and spent + cost <= (BUDGET if chosen else LONGEST):
                spent += cost
                chosen.append(test)
        named = [own] if not chosen and (ROOT / "tests" / own).exists() and own not in COSTLY else []
        return chosen + [f"tests/{test}" for test in (*named, *(test for test in COSTLY if file in COSTLY[test]))]


def killer(mutant: Mutant, tests: Sequence[str]) -> str:
    """The first test that fails, or "a hang" or "a crash"; empty: it survives."""
    if not tests:
        return ""
    with copied() as source:
        (source / mutant.path).write_text(mutant.source())
        # Ranks that a test kills must not be forks of the process that runs it: they would have its connections.
        costly = any(test.removeprefix("tests/") in COSTLY for test in tests)
        ranks = {"CONADV_RANKS": "forkserver" if costly else "fork"}
        return _forked(source, ["-x", *tests], ranks, LIMIT)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the source, beside the recipes that it looks for there."""
    with tempfile.TemporaryDirectory(prefix="conadv-mutant-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "recipes").symlink_to(ROOT / "recipes")
        yield Path(shutil.copytree(SOURCE, Path(folder) / "src"))


def _forked(source: Path, words: list[str], settings: dict[str, str], limit: float) -> str:
    """Run tests in a child, as `killer` says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _test(source, words, settings, writer)
    os.close(writer)
    status = _status(child, limit)
    with os.fdopen(reader) as pipe:
        failed = pipe.read().strip() if status is not None else ""
    return failed or ("a hang" if status is None else "a crash" if status else "")


class _Reporter:
    """A pytest plugin that writes the name of each test that fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._descriptor, f"{report.nodeid}\n".encode())

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)


def _test(source: Path, words: list[str], settings: dict[str, str], descriptor: int) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.update(settings, PYTHONPATH=str(source))
    sys.path.insert(0, str(source))
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    import pytest

    plain = ["-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT)]
    plain += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    os._exit(int(pytest.main([*plain, *words], plugins=[_Reporter(descriptor)])))


def _status(child: int, limit: float) -> int | None:
    """How a child ended, and with it all processes that it left; None: not in time."""
    end = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < end:
        done, found = os.waitpid(child, os.WNOHANG)
        status = found if done else None
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


class Known:
    """Who kills which mutant, kept in a file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "known.json"
        self.killers: dict[str, str] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def add(self, mutant: Mutant, found: str) -> None:
        self.killers[mutant.name] = found
        self._path.write_text(json.dumps(self.killers, indent=1))
        print(f"{f'killed by {found}' if found else 'SURVIVED'}  {mutant.name}", flush=True)

    def show(self) -> None:
        for part in TESTS:
            found = [by for name, by in self.killers.items() if name.startswith(f"conadv/{part}/")]
            print(f"{part}: {sum(map(bool, found))} of {len(found)} killed, a sample of {len(places(part, 0)):,}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, help="a folder that keeps what is known")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--count", type=int, default=40, help="mutants of each part")
    parser.add_argument("--part", choices=TESTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no mutant after this time")
    parser.add_argument("--only", default="", help="only mutants whose name has this text, such as pgd.py:94")
    parser.add_argument("--tests", nargs="+", help="run these, not those that execute the line")
    options = parser.parse_args()
    for name in IMPORTS:
        import_module(name)
    known = Known(options.state)
    end = time.monotonic() + 60 * options.minutes
    for part in options.part or TESTS:
        covering = None if options.tests else Covering(part, options.state)
        for place in places(part, options.seed)[: options.count]:
            mutant = Mutant(*place)
            killed = known.killers.get(mutant.name, "")
            if time.monotonic() > end or options.only not in mutant.name or killed:
                continue
            if covering is None:
                known.add(mutant, killer(mutant, options.tests))
            elif mutant.name not in known.killers:
                known.add(mutant, killer(mutant, covering.choose(mutant)))
    known.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
