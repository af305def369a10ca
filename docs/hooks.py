"""What MkDocs does beside rendering: pages from files in the root, equations as MathML, the order of search results, a
check of the built site.

Equations are written as GitHub renders them, ```math blocks and $`...`$, and become MathML when the site is built, so
that no page loads a script for them.
"""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
# Files outside docs/ that are pages of the site too, and where.
_OUTSIDE = {name: name.lower() for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")} | {
    f"studies/{page.parent.name}/README.md": f"studies/{page.parent.name}.md"
    for page in sorted(_ROOT.glob("studies/*/README.md"))
}
# How much a page counts in the site's search; others count 1. Guides come before records that name everything.
_BOOST = {
    "index.md": 2.0, "tutorial.md": 2.0, "command-line.md": 2.0, "own-loop.md": 2.0, "integrations.md": 2.0,
    "devices.md": 3.0, "how-it-works.md": 2.0, "compare.md": 2.0, "paper.md": 2.0, "results.md": 2.0, "log.md": 0.1,
    "changelog.md": 0.1,
}  # fmt: skip
_BOOST_BELOW = {"studies/": 0.3, "design/": 0.2}
# Links to files of a study, which GitHub shows and the site does not have.
_FILE_LINK = re.compile(r"\[([^\]]+)\]\([\w/.-]+\.(?:toml|py|jsonl?|csv)\)")
_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FLAG, _WHOLE = re.compile(r"--[\w.-]+"), r'<span class="flag">\g<0></span>'
_INLINE = re.compile(r"\$`([^`]+)`\$")
# Listings whose lines do not fit beside both navigations, and tables with sentences: the style sheet gives them room.
_LISTING, _LONG_LINE = re.compile(r'<div class="highlight"(?=>(.*?)</div>)', re.DOTALL), 107
_TABLE, _LONG_CELL, _COLUMNS = re.compile(r"<table>.*?</table>", re.DOTALL), 45, 6
_ROW, _HEAD, _CELL = (
    re.compile(r"<tr>.*?</tr>", re.DOTALL),
    re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL),
    re.compile("<td"),
)


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ as pages, with links that lead to pages."""
    for name, page in _OUTSIDE.items():
        text = (_ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace("](../../docs/", "](../")
        text = re.sub(r"\]\(\.\./(\w+)/README\.md", r"](\1.md", text)  # from one study to another
        text = _FILE_LINK.sub(r"\1", text)
        files.append(File.generated(config, page, content=_link_pages(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take the equations out of the text, so that Markdown does not read their underscores as emphasis.

    Also say how much the page counts in search: here and not in its front matter, which GitHub would show as a table.
    """
    name = page.file.src_uri
    below = [boost for folder, boost in _BOOST_BELOW.items() if name.startswith(folder)]
    page.meta["search"] = {"boost": _BOOST.get(name, below[0] if below else 1.0)}
    page.meta["equations"] = equations = []

    def set_aside(match: re.Match[str], display: str) -> str:
        equations.append(convert(match[1].strip(), display=display))
        return f"equation-{len(equations) - 1}-here"

    markdown = _BLOCK.sub(lambda match: set_aside(match, "block"), _link_pages(markdown, "../"))
    return _INLINE.sub(lambda match: set_aside(match, "inline"), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put the equations back, mark what is long, and keep together what browsers would break.

    They break a line after the `--` of a flag, and a table's cell before and after `±`.
    """
    html = re.sub(r"(?<=\d) ± (?=\d)", "\u00a0±\u00a0", html)
    html = _LISTING.sub(lambda match: match[0] + " data-long" * _is_long(match[1], _LONG_LINE), html)
    html = _TABLE.sub(_with_labels, html)
    html = re.sub(r"<code>([^<]*--[^<]*)</code>", lambda match: f"<code>{_FLAG.sub(_WHOLE, match[1])}</code>", html)
    return re.sub(r"equation-(\d+)-here", lambda match: page.meta["equations"][int(match[1])], html)


def _is_long(html: str, most: int) -> bool:
    """Whether a line of the text is longer than `most`; a table has a line for each cell."""
    return any(len(line) > most for line in unescape(re.sub("<[^>]+>", "", html)).splitlines())


def _with_labels(table: re.Match[str]) -> str:
    """A table with sentences, with the header of its column in every cell: on a phone each row becomes a list."""
    heads = [re.sub("<[^>]+>", "", head) for head in _HEAD.findall(table[0])]
    if len(heads) > _COLUMNS or not _is_long(table[0], _LONG_CELL):
        return table[0]

    def labelled(row: re.Match[str]) -> str:
        labels = iter(heads)
        return _CELL.sub(lambda cell: f'{cell[0]} data-label="{next(labels)}"', row[0])

    return _ROW.sub(labelled, table[0]).replace("<table>", "<table data-long>", 1)


def on_post_build(config: Any) -> None:
    """Refuse a site with a link to a file that it does not have, or with a page that loads something from elsewhere."""
    site = Path(config.site_dir)
    problems = [problem for page in sorted(site.rglob("*.html")) for problem in _problems(page, site)]
    if problems:
        raise PluginError("\n".join(problems))


class _References(HTMLParser):
    """The links of a page, and what a browser loads with it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.links.append(found.get("href", ""))
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found.get("href", ""))
        self.loaded += [found["src"]] if "src" in found else []


def _problems(page: Path, site: Path) -> list[str]:
    references = _References()
    references.feed(page.read_text(encoding="utf-8"))
    where = page.relative_to(site)
    elsewhere = [one for one in references.loaded if urlsplit(one).netloc]
    missing = [one for one in references.links + references.loaded if not _exists(one, page, site)]
    return [f"{where} loads {one} from another host" for one in elsewhere] + [f"{where}: no {one}" for one in missing]


def _exists(reference: str, page: Path, site: Path) -> bool:
    parts = urlsplit(reference)
    if parts.scheme or parts.netloc or not parts.path:
        return True
    path = unquote(parts.path)
    target = site / path.lstrip("/") if path.startswith("/") else page.parent / path
    return (target / "index.html").exists() if target.is_dir() else target.exists()


def _link_pages(text: str, prefix: str) -> str:
    for name, page in _OUTSIDE.items():
        text = text.replace(f"]({prefix}{name}", f"]({page}")
    return text
