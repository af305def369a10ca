"""The report of a study: one page of HTML and a Markdown text, from what a sweep wrote. No torch, no network.

evidence    the folder, read             conditions  runs that differ in the seed alone   spread   means and intervals
accuracy    settings  tuning  cost  curves  pictures   against_paper  setup                 sections, as blocks
page        blocks as HTML               markdown    blocks as Markdown                   style    how both look
drawing     charts as SVG                axes        their scales
"""

from .write import write_report

__all__ = ["write_report"]
