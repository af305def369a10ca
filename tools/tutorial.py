"""The tutorial as a notebook: docs/tutorial.md, run from top to bottom, with its outputs and its pictures.

    python tools/tutorial.py

writes examples/tutorial.ipynb and the pictures of the page. Python blocks become cells, and so do commands; a picture
below a block is what that block draws.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "examples" / "tutorial.ipynb"
_PART = re.compile(r"^```(python|console)\n(.*?)^```\n|^!\[[^\]]*\]\((\S+\.png)\)\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!http)([\w-]+\.md)")


def notebook() -> NotebookNode:
    """The page as cells that have not run."""
    text, cells, end = PAGE.read_text(encoding="utf-8"), [], 0
    for match in _PART.finditer(text):
        cells += _prose(text[end : match.start()])
        if match[3]:
            cells[-1].metadata["picture"] = match[3]
        elif match[1] == "console":
            cells.append(new_code_cell("%%bash\n" + re.sub(r"^\$ ", "", match[2], flags=re.MULTILINE).rstrip()))
        else:
            cells.append(new_code_cell(match[2].rstrip()))
        end = match.end()
    cells += _prose(text[end:])
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def run(cells: NotebookNode) -> None:
    """Run the cells in an empty folder, with the commands of this environment; the first error ends it."""
    with TemporaryDirectory() as folder:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        client = NotebookClient(
            cells,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"})


def pictures(cells: NotebookNode) -> dict[str, bytes]:
    """What the cells drew, by the path in the page."""
    return {
        cell.metadata["picture"]: base64.b64decode(output.data["image/png"])
        for cell in cells.cells
        if "picture" in cell.metadata
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    }


def _prose(text: str) -> list[NotebookNode]:
    text = _LINK.sub(r"](../docs/\1", text.strip())
    return [new_markdown_cell(text)] if text else []


if __name__ == "__main__":
    made = notebook()
    run(made)
    for name, picture in pictures(made).items():
        (PAGE.parent / name).write_bytes(picture)
    nbformat.write(made, NOTEBOOK)
