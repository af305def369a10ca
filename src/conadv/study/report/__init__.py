"""The report of a study as one HTML page and as Markdown, from the files that a sweep wrote. Loads no torch.

write      files of the report         evidence  the folder, read    conditions     runs that differ only in the seed
accuracy   training   setup            sections of the report        against_paper  the paper's numbers beside ours
document   blocks, HTML and Markdown   figures   SVG by matplotlib   templates/     the page and its style sheets
"""

from .write import write_report

__all__ = ["write_report"]
