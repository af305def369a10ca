"""Every code block of the documentation works: Python runs, commands parse, files that are shown can be read."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from cyclopts import MissingArgumentError
from torch import nn

from conadv.cli import parse
from conadv.config import Data, Recipe, dump_recipe
from conadv.study.study_file import read_study

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for folder in (".", "docs", "docs/design", "studies/*") for page in ROOT.glob(f"{folder}/*.md"))
# What is shown and not run: the output of commands, pictures of characters, formulas, part of a job script, and diffs
# of examples, which tests/integrations compares.
SHOWN = {"", "text", "math", "diff"}
# Records of what was once typed: their commands and scripts may be gone.
HISTORY = ("log.md", "CHANGELOG.md")
# Run from top to bottom as a notebook, below: it trains networks and draws.
NOTEBOOK = "docs/tutorial.md"


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.relative_to(ROOT).as_posix(), line, match[1], match[2]))
    return found


def of(language: str) -> list[Any]:
    return [pytest.param(one, id=f"{one.page}:{one.line}") for one in blocks() if one.language == language]


def commands() -> list[Any]:
    """The commands of ours in blocks and between backticks, wherever they stand."""
    found = {}
    for page in (page for page in PAGES if page.name not in HISTORY):
        text = page.read_text(encoding="utf-8")
        spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        lines = [line for one in blocks() if one.page == page.relative_to(ROOT).as_posix() for line in _lines(one.text)]
        for line in [*lines, *spans]:
            if words := _own_words(line):
                found[shlex.join(words)] = pytest.param(words, id=f"{page.name}: {shlex.join(words)}"[:100])
    return list(found.values())


def _lines(text: str) -> list[str]:
    return [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]


def _own_words(line: str) -> list[str] | None:
    """The arguments of `conadv`, also below torchrun and srun; None for other lines, and for commands cut short."""
    match = re.match(r"(?:\w+=\S+ )*(?:torchrun .*?-m |srun .*?|python -m )?conadv (-?[a-z].*)", line)
    if not match or "..." in line or "…" in line or "$" in line or "ARGUMENTS" in line:
        return None
    words = shlex.split(match[1], comments=True)
    return words[: words.index(">")] if ">" in words else words


@pytest.mark.parametrize("words", commands())
def test_a_command_parses(words, tmp_path, monkeypatch):
    if "--help" in words:
        words.remove("--help")
    if "--resume" in words:  # the recipe of the run is read
        monkeypatch.chdir(tmp_path)
        folder = Path(words[words.index("--resume") + 1].lstrip("/"))
        words[words.index("--resume") + 1] = str(folder)
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(dump_recipe(Recipe(data=Data(path="photos"))))
    named_only = len(words) <= 2 and all(word.isalpha() for word in words)  # prose that names a command
    try:
        parse(words)
    except MissingArgumentError:
        assert named_only


@pytest.mark.parametrize("page", sorted({one.page for one in blocks() if one.language == "python"} - {NOTEBOOK}))
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page run one after the other, with what a reader has at hand: a model, a loader and torch."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = torch.rand(8, 3, 8, 8), torch.randint(10, (8,))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "model": model, "loader": [(images, labels)] * 2}
    for one in blocks():
        if one.page == page and one.language == "python":
            exec(compile("\n" * one.line + one.text, page, "exec"), names)


@pytest.mark.parametrize("block", of("py"))
def test_an_excerpt_is_in_the_source(block):
    """The lines of a block marked `py` stand in one file of the source, in this order."""
    shown = [line.strip() for line in block.text.splitlines()]

    def has(path: Path) -> bool:
        lines = iter(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        return all(line in lines for line in shown)

    assert any(has(path) for path in (ROOT / "src").rglob("*.py")), block


def test_the_notebook_is_the_tutorial():
    nbformat = pytest.importorskip("nbformat")
    import tutorial

    kept, made = nbformat.read(tutorial.NOTEBOOK, 4), tutorial.notebook()
    sources = [[(one.cell_type, one.source) for one in cells.cells] for cells in (kept, made)]
    assert sources[0] == sources[1], "the page has changed: run python tools/tutorial.py"
    assert list(tutorial.pictures(kept)) == re.findall(r"\((\S+\.png)\)", tutorial.PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_notebook_runs():
    pytest.importorskip("nbclient")
    import tutorial

    cells = tutorial.notebook()
    tutorial.run(cells)
    assert len(tutorial.pictures(cells)) == 2


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_a_study(block, tmp_path):
    (tmp_path / "study.toml").write_text(block.text, encoding="utf-8")
    assert "arm" in tomllib.loads(block.text)
    assert read_study(tmp_path / "study.toml").cells


@pytest.mark.parametrize("block", of("json"))
def test_json_is_whole(block):
    assert json.loads(block.text)


def test_every_block_is_of_a_kind_that_is_checked():
    kinds = {"python", "py", "console", "toml", "json"} | SHOWN
    assert [one[:3] for one in blocks() if one.language not in kinds] == []
    # A console block shows commands; what they print goes into a block of its own.
    for one in blocks():
        if one.language == "console":
            assert all(re.match(r"\$ |\s", line) for line in one.text.splitlines()), one


def test_every_public_name_is_in_the_reference():
    import conadv

    listed = {line.rpartition(".")[2] for line in (ROOT / "docs" / "api.md").read_text().splitlines() if ":::" in line}
    assert listed == {*conadv.__all__, "Pool"}  # of conadv.ray, an extra
