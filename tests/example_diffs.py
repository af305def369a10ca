"""Each example with another library beside the same script without us, and the diff that docs/integrations.md shows.

A line that ends in `# conadv` is not in the plain script; `# conadv, was: CODE` stands in the place of CODE.
`python tests/example_diffs.py` writes the diffs to the docs.
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
    """What is added and removed, without the lines around it."""
    text = (ROOT / "examples" / name).read_text()
    ours = [re.sub(r"  # conadv(, was: .*)?$", "", line) for line in text.splitlines()]
    lines = difflib.unified_diff(plain(text).splitlines(), ours, n=0, lineterm="")
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return "\n".join(line for line in changed if line.strip("+- "))


def written(page: str) -> str:
    """The page with every block of an example up to date."""
    return _BLOCK.sub(lambda found: f"```diff\n# examples/{found[1]}\n{diff(found[1])}\n```", page)


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
