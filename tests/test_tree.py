"""ARCHITECTURE.md shows the tree as it is: a line for every module, or for the package that holds it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def listed() -> set[str]:
    """The paths below src/conadv that the tree names."""
    tree = re.search(r"## The tree\n+```\n(.*?)```", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    paths, folders, inside = set(), {}, False
    for line in tree[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        inside = name.startswith("src/") or (inside and depth > 0)
        if inside and depth:
            path = "/".join([folders[level] for level in range(1, depth)] + [name.rstrip("/")])
            folders[depth] = name.rstrip("/")
            paths.add(path)
    return paths


def test_every_module_is_listed():
    source = ROOT / "src" / "conadv"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if not path.name.startswith("__")}
    names = listed()
    missing = {path for path in modules if path not in names and path.rpartition("/")[0] not in names}
    # A folder whose files are listed one by one must list them all.
    listed_folders = {name.rpartition("/")[0] for name in names if name.endswith(".py")}
    missing |= {path for path in modules if path.rpartition("/")[0] in listed_folders and path not in names}
    assert not missing


def test_everything_listed_exists():
    assert listed()
    for name in listed():
        assert (ROOT / "src" / "conadv" / name).exists(), name
