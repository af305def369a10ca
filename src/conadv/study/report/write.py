"""From the folder of a study to the files of its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conadv.train.files import write_atomically

from .accuracy import accuracy_section
from .against_paper import paper_section
from .blocks import Block, Document, Paragraph, Section
from .cost import gap_section, time_section
from .curves import curve_section
from .evidence import Evidence, collect
from .markdown import figure_files, render_markdown
from .page import render_page
from .pictures import picture_section
from .settings import setting_sections
from .setup import command_section, failure_section, setup_section, status
from .tuning import rate_section


def write_report(folder: Path, out: Path | None = None) -> dict[str, Any]:
    """Write OUT.html, OUT.md and OUT-figures/; return where they are and how much of the study they show."""
    evidence = collect(folder)
    page = out or folder / "report.html"
    if page.suffix != ".html":
        raise ValueError(f"a report is written as HTML, not {str(page)!r}: name a file that ends in .html")
    document = build_document(evidence)
    figures = page.with_name(f"{page.stem}-figures")
    try:
        figures.mkdir(parents=True, exist_ok=True)
        for name, drawing in figure_files(document).items():
            write_atomically(figures / name, drawing)
        write_atomically(page.with_suffix(".md"), render_markdown(document, figures.name))
        write_atomically(page, render_page(document))
    except OSError as error:
        raise ValueError(f"cannot write {str(page)!r} ({error.strerror or error}): name another file with -o") from None
    done = sum(result.summary is not None for result in evidence.results)
    return {"page": str(page), "markdown": str(page.with_suffix(".md")), "cells": len(evidence.results), "done": done}


def build_document(evidence: Evidence) -> Document:
    """The whole report; a section for which the study has no data is left out."""
    lead: list[Block] = [*_paragraphs(evidence.about), status(evidence)]
    sections: list[Section | None] = []
    if evidence.conclusions:
        sections.append(Section("conclusions", "Conclusions", _paragraphs(evidence.conclusions)))
    if evidence.main:
        sections += [accuracy_section(evidence), *setting_sections(evidence), paper_section(evidence)]
        sections += [rate_section(evidence), gap_section(evidence), time_section(evidence)]
        sections += [curve_section(evidence), picture_section(evidence)]
    sections += [failure_section(evidence), setup_section(evidence), command_section(evidence)]
    return Document(evidence.title, lead, [section for section in sections if section is not None])


def _paragraphs(text: str) -> list[Paragraph]:
    """Texts that an empty line parts."""
    parts = (" ".join(part.split()) for part in text.replace("\r\n", "\n").split("\n\n"))
    return [Paragraph(part) for part in parts if part]
