"""A report as blocks, rendered as HTML (templates/page.html.jinja) and Markdown.

A text is a string that is shown literally, `Code`, `Strong`, or a tuple of these. Both formats escape every string,
because strings come from study files and results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined


class Code(str):
    """A text in a fixed-width font."""


class Strong(str):
    """A text in bold."""


Text = str | tuple[str, ...]


@dataclass(frozen=True)
class Paragraph:
    text: Text


@dataclass(frozen=True)
class Items:
    """A list of named facts."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    slug: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: frozenset[int] = frozenset()
    """The columns that hold text; the others hold numbers and are aligned right."""


@dataclass(frozen=True)
class Figure:
    slug: str
    caption: str
    drawings: Sequence[str]
    """`svg` elements without a namespace, shown side by side if there is room."""


@dataclass(frozen=True)
class Listing:
    """Preformatted text to copy."""

    text: str


Block = Paragraph | Items | Table | Figure | Listing


@dataclass(frozen=True)
class Section:
    slug: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    title: str
    lead: Sequence[Block]
    """Before the first section."""
    sections: Sequence[Section]


def plain(text: str) -> str:
    """Put a text on one line and remove control characters."""
    return _clean(text).strip()


def _clean(text: str) -> str:
    return re.sub(" +", " ", "".join(letter if letter.isprintable() else " " for letter in text))


def _pieces(text: Text) -> Iterator[tuple[str, str]]:
    """A text as pairs of tag and text."""
    for part in text if isinstance(text, tuple) else (text,):
        tag = "code" if isinstance(part, Code) else "strong" if isinstance(part, Strong) else ""
        yield tag, _clean(part)


def _numbers() -> Callable[[Block], str]:
    """A function that numbers tables and figures, in the order in which it is called."""
    counts: Counter[str] = Counter()

    def number(block: Block) -> str:
        name = type(block).__name__
        counts[name] += 1
        return f"{name} {counts[name]}"

    return number


def render_page(document: Document) -> str:
    """The report as one HTML page."""
    environment = Environment(
        loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    page = environment.get_template("page.html.jinja")
    names: dict[str, object] = {
        "kind": lambda block: type(block).__name__,
        "number": _numbers(),
        "plain": plain,
        "pieces": _pieces,
    }
    return page.render(document=document, **names).lstrip()


# Markdown


def render_markdown(document: Document, figures: str) -> str:
    """The report as Markdown; `figures` is the folder of the figures, relative to the text."""
    number = _numbers()
    parts = [f"# {_markdown(document.title)}", *(_block(block, number, figures) for block in document.lead)]
    for section in document.sections:
        parts += [f"## {_markdown(section.title)}", *(_block(block, number, figures) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def figure_files(document: Document) -> dict[str, str]:
    """The drawings by the file names that the Markdown uses."""
    blocks = [block for section in document.sections for block in section.blocks]
    return {
        _file(block, number): drawing
        for block in (*document.lead, *blocks)
        if isinstance(block, Figure)
        for number, drawing in enumerate(block.drawings)
    }


def escape_markdown(text: str) -> str:
    """Escape a text so that Markdown, also GitHub's, shows it literally wherever it stands."""
    escaped = re.sub(r"([\\`*_\[\]#~$@])", r"\\\1", plain(text))
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
        escaped = escaped.replace(character, entity)
    escaped = escaped.replace("://", ":&#47;/").replace("www.", "www&#46;")  # would become links by themselves
    # At the start of a line: a list, a rule or an underlined heading.
    escaped = re.sub(r"^([-+=])(?=[\s=-]|$)", r"\\\1", escaped)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", escaped)


def _block(block: Block, number: Callable[[Block], str], figures: str) -> str:
    match block:
        case Paragraph(text):
            return _markdown(text)
        case Items(pairs):
            return "\n".join(f"- {_markdown(Strong(name))} {_markdown(value)}" for name, value in pairs)
        case Listing(text):
            fence = "`" * (max([2, *map(len, re.findall("`+", text))]) + 1)
            return f"{fence}\n{text.rstrip()}\n{fence}"
        case Table():
            rules = [":--" if place == 0 or place in block.prose else "--:" for place in range(len(block.head))]
            head, *rows = [[_markdown(cell) for cell in row] for row in (block.head, *block.rows)]
            table = "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))
            return f"**{number(block)}.** {_markdown(block.caption)}\n\n{table}"
        case Figure():
            caption, folder = _markdown(block.caption), quote(figures)
            images = [f"![{caption}]({folder}/{_file(block, place)})" for place in range(len(block.drawings))]
            return "\n".join(images) + f"\n\n**{number(block)}.** {caption}"


def _file(figure: Figure, place: int) -> str:
    return f"{figure.slug}-{place + 1}.svg" if len(figure.drawings) > 1 else f"{figure.slug}.svg"


def _markdown(text: Text) -> str:
    return "".join(_marked(tag, part) for tag, part in _pieces(text)).strip()


def _marked(tag: str, text: str) -> str:
    if tag == "code" and text.strip() and not re.search(r"[`|\\]", text):
        return f"`{text.strip()}`"
    escaped = escape_markdown(text)
    if tag == "strong" and escaped:
        return f"**{escaped}**"
    return f"{' ' * text.startswith(' ')}{escaped}{' ' * text.endswith(' ')}"
