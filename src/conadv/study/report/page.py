"""A report as one page of HTML that needs nothing but itself: no network, no script."""

from __future__ import annotations

import re
from html import escape

from .blocks import Block, Document, Figure, Items, Listing, Numbers, Paragraph, Section, Table
from .style import page_style


def render_page(document: Document) -> str:
    numbers = Numbers()
    title = escape(document.title)
    lead = "\n".join(_block(block, numbers) for block in document.lead)
    sections = "\n".join(_section(section, numbers) for section in document.sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{page_style()}</style>
</head>
<body>
<header>
<h1>{title}</h1>
{lead}
{_contents(document)}
</header>
<main>
{sections}
</main>
<footer>Written by <code>conadv report</code>.</footer>
</body>
</html>
"""


def _contents(document: Document) -> str:
    links = "".join(f'<li><a href="#{one.slug}">{escape(one.title)}</a></li>' for one in document.sections)
    return f'<nav aria-label="Contents"><ol>{links}</ol></nav>'


def _section(section: Section, numbers: Numbers) -> str:
    blocks = "\n".join(_block(block, numbers) for block in section.blocks)
    heading = f'<h2 id="{section.slug}-title">{escape(section.title)}</h2>'
    return f'<section id="{section.slug}" aria-labelledby="{section.slug}-title">\n{heading}\n{blocks}\n</section>'


def _block(block: Block, numbers: Numbers) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Items(pairs):
            return (
                "<dl>"
                + "".join(f"<dt>{_inline(name)}</dt><dd>{_inline(value)}</dd>" for name, value in pairs)
                + "</dl>"
            )
        case Listing(text):
            return f'<pre tabindex="0"><code>{escape(text.rstrip())}</code></pre>'
        case Table():
            return _table(block, numbers.name(block))
        case Figure():
            return _figure(block, numbers.name(block))


def _table(table: Table, name: str) -> str:
    caption = f"<caption><b>{name}.</b> {_inline(table.caption)}</caption>"
    head = "".join(
        f'<th scope="col"{_kind(table, number)}>{_inline(cell)}</th>' for number, cell in enumerate(table.head)
    )
    rows = "\n".join(f"<tr>{_row(table, row)}</tr>" for row in table.rows)
    body = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    # A table that is wider than the screen scrolls by itself, also from the keyboard.
    scroll = f'class="scroll {table.slug}" role="region" aria-label="{name}" tabindex="0"'
    return f'<div id="{table.slug}" {scroll}>{body}</div>'


def _row(table: Table, row: object) -> str:
    assert isinstance(row, list | tuple)
    first, *rest = row
    cells = "".join(f"<td{_kind(table, number)}>{_inline(cell)}</td>" for number, cell in enumerate(rest, 1))
    return f'<th scope="row"{_kind(table, 0)}>{_inline(first)}</th>{cells}'


def _kind(table: Table, column: int) -> str:
    return ' class="prose"' if column == 0 or column in table.prose else ""


def _figure(figure: Figure, name: str) -> str:
    caption = f"<figcaption><b>{name}.</b> {_inline(figure.caption)}</figcaption>"
    return f'<figure id="{figure.slug}"><div class="drawings">{"".join(figure.drawings)}</div>{caption}</figure>'


def _inline(text: str) -> str:
    """`code` and **strong**; every other character stands for itself."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", marked)
