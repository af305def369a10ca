"""A report as Markdown, with its figures as files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .blocks import Block, Document, Figure, Items, Listing, Numbers, Paragraph, Table
from .style import standalone


def render_markdown(document: Document, figures: str) -> str:
    """The text; its figures lie in the folder `figures`."""
    numbers = Numbers()
    parts = [f"# {_text(document.title)}"]
    parts += [part for block in document.lead for part in _block(block, numbers, figures)]
    for section in document.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [part for block in section.blocks for part in _block(block, numbers, figures)]
    return "\n\n".join(parts) + "\n"


def figure_files(document: Document) -> dict[str, str]:
    """The drawings by the names that the Markdown uses."""
    blocks = [block for section in document.sections for block in section.blocks]
    return {
        _file(block, number): standalone(drawing)
        for block in (*document.lead, *blocks)
        if isinstance(block, Figure)
        for number, drawing in enumerate(block.drawings)
    }


def _block(block: Block, numbers: Numbers, figures: str) -> Iterator[str]:
    match block:
        case Paragraph(text):
            yield _text(text)
        case Items(pairs):
            yield "\n".join(f"- **{_text(name)}** {_text(value)}" for name, value in pairs)
        case Listing(text):
            fence = "`" * (max([2, *(len(run) for run in re.findall("`+", text))]) + 1)
            yield f"{fence}\n{text.rstrip()}\n{fence}"
        case Table():
            yield f"**{numbers.name(block)}.** {_text(block.caption)}"
            yield _table(block)
        case Figure():
            caption = _text(block.caption)
            yield "\n".join(f"![{caption}]({figures}/{_file(block, number)})" for number in range(len(block.drawings)))
            yield f"**{numbers.name(block)}.** {caption}"


def _table(table: Table) -> str:
    rules = [":--" if number == 0 or number in table.prose else "--:" for number in range(len(table.head))]
    rows = [table.head, rules, *table.rows]
    return "\n".join("| " + " | ".join(_text(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _file(figure: Figure, number: int) -> str:
    return f"{figure.slug}-{number + 1}.svg" if len(figure.drawings) > 1 else f"{figure.slug}.svg"


def _text(text: str) -> str:
    """On one line, and without what Markdown would take for HTML or a link; code is left as it is."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([<>\[\]_#\\])", r"\\\1", part) for part in parts)
