"""What a report is made of, before it is a page or a Markdown text.

In texts, `...` is code and **...** is strong; everything else is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Items:
    """Facts with a name each."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    slug: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    prose: frozenset[int] = frozenset()
    """The columns with texts; the others have figures, which are set flush right."""


@dataclass(frozen=True)
class Figure:
    slug: str
    caption: str
    drawings: Sequence[str]
    """Elements `svg`, without a namespace; side by side where there is room."""


@dataclass(frozen=True)
class Listing:
    """Lines to be copied."""

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


class Numbers:
    """Counts tables and figures, so that captions can be cited."""

    def __init__(self) -> None:
        self._tables = 0
        self._figures = 0

    def name(self, block: Table | Figure) -> str:
        if isinstance(block, Table):
            self._tables += 1
            return f"Table {self._tables}"
        self._figures += 1
        return f"Figure {self._figures}"
