"""Promise: imports point down, and what needs no torch loads none."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import conadv

ROOT = Path(__file__).parents[1] / "src" / "conadv"
# Which parts of the package a part may import, beside itself.
_TABLE = {
    "wrappers": "",
    "roles": "",
    "peers": "wrappers",
    "catalog": "roles",
    "core": "wrappers peers roles",
    "ray": "ranks wrappers",
    "optim": "",
    "sinks": "atomic",
    "atomic": "",
    "last_words": "",
    "machine": "",
    "printing": "",
    "config": "catalog roles core optim sinks printing",
    "task": "catalog core atomic machine printing",
    "ranks": "catalog roles core wrappers machine last_words",
    "trainer": "catalog roles last_words core optim task ranks ray sinks atomic printing machine wrappers",
    "trained": "atomic catalog config core ranks task trainer",
    "study": "atomic catalog core optim task ranks trainer config printing machine",
    "cli": "last_words machine task trained ranks trainer study config printing",
    "__main__": "cli",
    "__init__": "roles core optim ranks config trainer",
}
MAY_IMPORT = {part: set(others.split()) for part, others in _TABLE.items()}
# Others get a recipe with the task, or none.
MAY_IMPORT_CONFIG = {f"trainer/{name}.py" for name in ("build", "train")}
# Other packages: core is torch only, and each part needs nothing that is not its business.
THIRD_PARTY_OF_CORE = {"torch"}


def modules() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The full names of the modules that a file imports anywhere, also within functions."""
    package = ("conadv", *path.parts[:-1])
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("conadv.")}
    allowed = MAY_IMPORT[part] | {part, "__version__"}
    if path.as_posix() in MAY_IMPORT_CONFIG:
        allowed |= {"config"}
    assert ours <= allowed, f"{path} imports {', '.join(sorted(ours - allowed))}"


@pytest.mark.parametrize("path", [path for path in modules() if part_of(path) == "core"], ids=str)
def test_core_needs_torch_only(path: Path) -> None:
    others = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - {"conadv"}
    assert others <= THIRD_PARTY_OF_CORE


def test_every_public_name_is_where_it_says() -> None:
    assert all(getattr(conadv, name).__module__.startswith("conadv.") for name in conadv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Conadv'"):
        conadv.Conadv  # noqa: B018


def test_no_public_name_is_a_module_too() -> None:
    """Importing such a module would put it in the place of the public function."""
    assert not {path.stem for path in ROOT.iterdir()} & set(conadv.__all__)


def load_no_torch(names: list[str]) -> None:
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_itself_loads_no_torch() -> None:
    catalogs = ["conadv.catalog", "conadv.optim", "conadv.sinks"]
    load_no_torch(["conadv", "conadv.cli", "conadv.config", *catalogs, "conadv.ranks.layout"])


def test_reporting_loads_no_torch() -> None:
    load_no_torch(["conadv.study.report"])
