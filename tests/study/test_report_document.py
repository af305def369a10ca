"""Texts in HTML and Markdown: whatever they hold, a reader sees them literally. Markdown is read by markdown-it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from conadv.study.report import write_report
from conadv.study.report.document import (
    Code,
    Document,
    Figure,
    Items,
    Listing,
    Paragraph,
    Section,
    Strong,
    Table,
    escape_markdown,
    plain,
    render_markdown,
    render_page,
)
from conadv.study.results import read_results
from study.reports import Page
from study.studies import add_gallery, make_study

HOSTILE = [
    "<script>alert(1)</script>",
    "![x](http://example.org/x.png)",
    "[x](javascript:alert(1))",
    "| a | b |",
    "`code` ``more`` `",
    "a\nb\n\n# c\n- d\n---",
    "<http://example.org> http://example.org www.example.org a@example.org",
    "**bold** _it_ __it__ ~~gone~~ $x$",
    "&lt;b&gt; &amp; &#60;",
    "\\` \\[x](y) \\| \\",
    "- item",
    "1. item",
    "1) item",
    "+ item",
    "===",
    "---",
    "# heading",
    "> quote",
    "    indented",
    "<!-- comment",
    "[a]: http://example.org",
    "\x00\x1b[31m\u202e\ud800",
    '" onload="alert(1)',
    "{{ 7 * 7 }} {% raw %}",
    "",
]
ALLOWED = {"p", "h1", "h2", "table", "thead", "tbody", "tr", "th", "td", "strong", "code", "pre",
           "ul", "li", "img"}  # fmt: skip


class Reader(HTMLParser):
    """Tags, addresses and the visible text of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def read_markdown(text: str) -> Reader:
    """As a lenient viewer would: HTML, tables, strikethrough and bare links on."""
    viewer = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return Reader(viewer.render(text))


def document(text: str) -> Document:
    blocks = [
        Paragraph(text),
        Paragraph(("before ", Code(text), " between ", Strong(text), " after")),
        Items([(text, text)]),
        Table("t", text, [text, "b"], [[text, Code(text)], [Strong(text), text]], frozenset({1})),
        Listing(text.replace("\ud800", "")),
        Figure("f", text, ["<svg></svg>"]),
    ]
    return Document(text, [Paragraph(text)], [Section("s", text, blocks)])


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_every_text_literally(text: str) -> None:
    seen = read_markdown(render_markdown(document(text), "some folder (1)"))
    assert seen.tags <= ALLOWED
    assert seen.addresses == ["some%20folder%20%281%29/f.svg"]
    # Everywhere but in the listing and the alternative text: title, paragraphs, items, caption, cells, figure.
    assert seen.text.count(plain(text)) >= (12 if plain(text) else 0)


@given(st.text(max_size=60))
def test_escaped_text_reads_as_it_is_in_a_paragraph_and_in_a_table(text: str) -> None:
    shown = escape_markdown(text)
    paragraph = read_markdown(f"{shown}\n")
    assert paragraph.text == " ".join(plain(text).split()) and paragraph.tags <= {"p"}
    table = read_markdown(f"| {shown} | b |\n| :-- | --: |\n| {shown} | c |\n")
    assert table.tags == {"table", "thead", "tbody", "tr", "th", "td"}
    assert "".join(table.texts).count("b") >= 1
    assert not re.search(r"://|www\.|(?<!\\)@", shown)  # what GitHub would make a link or a mention of


@pytest.mark.parametrize("text", HOSTILE)
def test_html_shows_every_text_literally(text: str) -> None:
    html = render_page(document(text))
    page = Page(html)
    assert not {"script", "img"} & set(page.tags)
    assert "onload" not in re.sub(r">[^<]*<", "><", html)  # no attribute
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    (table,) = page.tables
    assert [" ".join(cell.split()) for cell in table.column("b")] == [plain(text)] * 2
    html.encode("utf-8")


@pytest.mark.parametrize("text", HOSTILE)
def test_every_string_of_a_study_is_escaped_in_the_whole_report(tmp_path: Path, text: str) -> None:
    """Titles, arms, errors, commands, classes, versions and settings alike."""
    study = 'arm = [{name = "arm"}, {name = "plain", method = "vanilla"}]\n[grid]\nseed = [0, 1, 2]\n'
    folder = make_study(tmp_path, study, lambda values: "failed" if values["seed"] == 2 else 50.0, steps=3)
    text = text.replace("\ud800", "")
    add_gallery(folder / "runs" / read_results(folder)[0].cell)
    for path in (folder / "results.jsonl", folder / "origin.json", *folder.glob("runs/*/gallery.json")):
        content = path.read_text(encoding="utf-8")
        for word in ("class 1", "aeroplane", "A processor", "2026-11-15"):
            content = content.replace(f'"{word}"', json.dumps(text))
        path.write_text(content, encoding="utf-8")
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["arm"] = text if line["arm"] == "arm" else line["arm"]
        line |= {"name": text + line["name"], "grids": [text], "command": text}
        line["values"] |= {"data.path": text, "data.name": None, "model": text, text: 3 + line["values"]["seed"]}
        line["error"] = line["error"] and text
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = json.dumps(text)
    (folder / "study.toml").write_text(f"title = {words}\nabout = {words}\nconclusions = {words}\n", encoding="utf-8")
    write_report(folder)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(page.tags)
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert len(page.ids) == len(set(page.ids))
    seen = read_markdown((folder / "report.md").read_text(encoding="utf-8"))
    assert seen.tags <= ALLOWED
    assert all(address.startswith("report-figures/") for address in seen.addresses)
    assert {path.parent for path in folder.glob("**/*.svg")} == {folder / "report-figures"}
