"""Each example with another library beside the same script without us, and the diff that docs/integrations.md shows.

A line that ends in `# conadv` is not in the plain script; `# conadv, was: CODE` stands in the place of CODE.
`python tools/example_diffs.py` writes the diffs to the docs.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "integrations.md"
_MARK = re.compile(r"^( *)(.*?)  # conadv(?:, was: (.*))?$")
# A block of the docs: the marked line that names the example, and its diff.
_BLOCK = re.compile(r"```diff\n# examples/(\w+\.py)\n.*?```", re.DOTALL)


def plain(text: str) -> str:
    """The script without us."""
    lines = []
    for line in text.splitlines():
        found = _MARK.match(line)
        if found is None:
            lines.append(line)
        elif found[3]:
            lines.append(found[1] + found[3])
    return re.sub(r"\n{3,}", "\n\n\n", "\n".join(lines)) + "\n"


def diff(name: str) -> str:
    """What is added and removed, below the lines that it is indented under."""
    text = (ROOT / "examples" / name).read_text()
    ours = [re.sub(r"  # conadv(, was: .*)?$", "", line) for line in text.splitlines()]
    shown: list[str] = []
    for line in difflib.unified_diff(plain(text).splitlines(), ours, n=0, lineterm=""):
        if line.startswith("@@"):
            first = int(re.findall(r"\+(\d+)", line)[0]) - 1
            shown += [f" {above}" for above in _above(ours, first) if not {f" {above}", f"+{above}"} & set(shown)]
        elif line.strip("+- ") and not line.startswith(("---", "+++")):
            shown.append(line)
    return "\n".join(shown)


def _above(lines: list[str], number: int) -> list[str]:
    """The lines that another one is indented under, outermost first: the heads of its class, function, loop, call."""
    indent, found = _indent(next(line for line in lines[number:] if line)), []
    for line in reversed(lines[:number]):
        if line and _indent(line) < indent:
            indent = _indent(line)
            found.insert(0, line)
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def written(page: str) -> str:
    """The page with every block of an example up to date."""
    return _BLOCK.sub(lambda found: f"```diff\n# examples/{found[1]}\n{diff(found[1])}\n```", page)


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
