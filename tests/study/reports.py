"""A report as its reader has it: tables by caption, figures, ids and addresses, from the HTML alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_EMPTY = {"meta", "link", "br", "img", "input"}


@dataclass
class Table:
    caption: str = ""
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    scopes: list[str | None] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        return [row[self.head.index(name)] for row in self.rows]

    def row(self, name: str) -> dict[str, str]:
        (found,) = (row for row in self.rows if row[0] == name)
        return dict(zip(self.head, found, strict=True))


class Page(HTMLParser):
    """Reads a page, and fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.figures: list[str] = []
        self._open: list[str] = []
        self._texts: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value is not None]
        self.addresses += [
            value or "" for name, value in attrs if name in ("href", "src", "action", "data", "xlink:href", "srcset")
        ]
        if tag == "table":
            self.tables.append(Table())
        if tag == "tr":
            self.tables[-1].rows.append([])
        if tag == "th":
            self.tables[-1].scopes.append(attributes.get("scope"))
        if tag not in _EMPTY or self._is_in_svg():
            self._open.append(tag)
            self._texts.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _EMPTY or self._is_in_svg():
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        for text in self._texts:
            text.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        text = "".join(self._texts.pop()).strip()
        match tag:
            case "caption":
                self.tables[-1].caption = text
            case "th" | "td":
                self.tables[-1].rows[-1].append(text)
            case "thead":
                self.tables[-1].head = self.tables[-1].rows.pop()
            case "h2":
                self.titles.append(text)
            case "figcaption":
                self.figures.append(text)

    def _is_in_svg(self) -> bool:
        return "svg" in self._open

    def table(self, words: str) -> Table:
        """The only table whose caption has these words."""
        (found,) = (table for table in self.tables if words in table.caption)
        return found
