"""The report of a study as one HTML page and as Markdown, from the files that a sweep wrote. Loads no torch.

evidence   the folder, read            conditions     runs that differ only in the seed, and what is compared
accuracy   training   setup            against_paper  cost  the sections
document   blocks, HTML and Markdown   figures        SVG by matplotlib      templates/  the page and its style sheets
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from conadv.study.results import keep
from conadv.trainer.files import replace_file

from . import accuracy, against_paper, cost, setup, training
from .document import Block, Code, Document, Paragraph, Section, figure_files, render_markdown, render_page
from .evidence import Evidence, collect
from .figures import standalone

__all__ = ["write_report"]


def write_report(folder: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the report of a study as OUT.html, OUT.md and OUT-figures/, and return what `conadv report` prints.

    Of the folder of the study only results.jsonl is required. `out` is by default report.html in it.
    """
    evidence = collect(folder)
    page = out or folder / "report.html"
    if page.suffix != ".html":
        raise ValueError(f"a report is written as HTML, not {str(page)!r}: choose a name that ends in .html")
    text, figures = page.with_suffix(".md"), page.with_name(f"{page.stem}-figures")
    _check_free(page, text, figures)
    found = training.find_curves(evidence)
    kept = keep(folder / training.CURVES, found, training.check_curves)
    names = [evidence.name(one) for one in evidence.shown]  # an arm that was renamed or removed is not shown
    curves = {kind: {name: of[name] for name in names if name in of} for kind, of in kept.items()}
    document = build_document(evidence, curves)
    try:
        figures.mkdir(parents=True, exist_ok=True)
        for name, drawing in figure_files(document).items():
            replace_file(figures / name, standalone(drawing).encode())
        replace_file(text, render_markdown(document, figures.name).encode())
        replace_file(page, render_page(document).encode())
    except OSError as error:
        problem = error.strerror or error
        raise ValueError(f"cannot write {str(page)!r} ({problem}): choose another file with -o") from None
    done = sum(result.summary is not None for result in evidence.results)
    return {"page": str(page), "markdown": str(text), "cells": len(evidence.results), "done": done}


def _check_free(page: Path, text: Path, figures: Path) -> None:
    """Refuse targets that cannot be replaced before anything is written."""
    taken = {path: "a folder" for path in (page, text) if path.is_dir()}
    if figures.exists() and not figures.is_dir():
        taken[figures] = "not a folder"
    for path, what in taken.items():
        raise ValueError(f"cannot write {str(path)!r}, which is {what}: choose another file with -o")


def build_document(evidence: Evidence, curves: training.Curves) -> Document:
    """The whole report, without the sections for which the study has no data."""
    lead: list[Block] = [*_paragraphs(evidence.about), setup.status(evidence)]
    sections: list[Section | None] = []
    if evidence.conclusions:
        sections.append(Section("conclusions", "Conclusions", _paragraphs(evidence.conclusions)))
    if evidence.main:
        sections += [accuracy.by_method(evidence), *accuracy.by_setting(evidence), against_paper.section(evidence)]
        sections += [training.rates(evidence), training.gap(evidence), cost.section(evidence)]
        sections += [training.time(evidence) if evidence.timed else None]
        sections += [training.curves(curves), training.pictures(evidence)]
    sections += [setup.failures(evidence), setup.setup(evidence), setup.commands(evidence)]
    return Document(evidence.title, lead, [section for section in sections if section is not None])


def _paragraphs(text: str) -> list[Paragraph]:
    """Paragraphs are separated by empty lines; `...` is code."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text.replace("\r\n", "\n")))
    pieces = (re.split(r"`([^`]+)`", part) for part in parts if part)
    return [Paragraph(tuple(Code(one) if place % 2 else one for place, one in enumerate(of))) for of in pieces]
