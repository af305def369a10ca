"""How a report looks: one style for drawings, on a page or alone, and one for the page."""

from __future__ import annotations

# Colours of series, by place; they keep a distance in lightness, and markers and dashes tell series apart without them.
_LIGHT = ("#1f4e9c", "#c4501b", "#2f7d4f", "#8a3f9e", "#8a6d00", "#0f7f8c", "#b0305c", "#555555")
_DARK = ("#8ab4ff", "#ffa070", "#7fd6a0", "#d9a3ee", "#e0c04f", "#6fd3df", "#ff8fb3", "#c0c0c0")

# Alone, a drawing lies on whatever its reader has: it brings its own paper.
_DRAWING = """
.drawing { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; }
.drawing text { fill: var(--ink); }
.drawing .quiet, .drawing .small { fill: var(--quiet); }
.drawing .small { font-size: 11px; }
.drawing .name { font-weight: 600; }
.drawing .grid { stroke: var(--rule); stroke-width: 1; }
.drawing .axis { stroke: var(--quiet); stroke-width: 1; }
.drawing .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.drawing .bar { stroke-width: 1.4; }
.drawing .leader { stroke-width: 0.8; opacity: 0.7; }
.drawing .hollow { fill: var(--paper); }
.drawing .frame { fill: none; stroke: var(--rule); }
.drawing image { image-rendering: pixelated; }
"""

_PALETTE = {
    "light": {"paper": "#fffefb", "ink": "#1a1a1a", "quiet": "#5c5c5c", "rule": "#d9d6cd", "wash": "#f4f1e8"},
    "dark": {"paper": "#14161a", "ink": "#e8e6e1", "quiet": "#a3a29d", "rule": "#3a3d44", "wash": "#1e2127"},
}

_PAGE = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 64rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 17px/1.55 Charter, "Bitstream Charter", "Source Serif 4", Georgia, Cambria, "Times New Roman", serif; }
h1, h2, nav, caption, figcaption, table, dl { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.01em; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 3rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--rule); }
p { max-width: 42rem; margin: 0 0 1rem; }
a { color: inherit; }
nav { font-size: 0.9rem; margin: 1.5rem 0; }
nav ol { list-style: none; display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; margin: 0; padding: 0; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.82em; }
code { overflow-wrap: anywhere; }
pre { background: var(--wash); padding: 0.9rem 1rem; overflow-x: auto; line-height: 1.45; border-radius: 4px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.2rem;
  font-size: 0.9rem; margin: 0 0 1.25rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 1.5rem 0 2rem; }
.scroll:focus-visible { outline: 2px solid var(--s0); outline-offset: 3px; }
table { border-collapse: collapse; font-size: 0.88rem; line-height: 1.35; font-variant-numeric: tabular-nums;
  border-top: 2px solid var(--ink); border-bottom: 2px solid var(--ink); min-width: min(100%, 36rem); }
caption, figcaption { text-align: left; font-size: 0.88rem; line-height: 1.45; color: var(--ink); max-width: 42rem; }
caption { padding-bottom: 0.5rem; }
caption b, figcaption b { margin-right: 0.25rem; }
th, td { padding: 0.3rem 0.75rem; text-align: right; white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { border-bottom: 1px solid var(--ink); vertical-align: bottom; font-weight: 600; white-space: normal; }
tbody th { font-weight: 500; }
.prose { text-align: left; white-space: normal; min-width: 9rem; }
.commands .prose:last-child { min-width: 20rem; }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
figure { margin: 1.75rem 0 2.25rem; }
.drawings { display: flex; flex-wrap: wrap; gap: 1.5rem; }
.drawings svg { flex: 0 1 29rem; width: 100%; max-width: 29rem; height: auto; display: block; overflow: visible; }
figcaption { margin-top: 0.6rem; }
footer { margin-top: 3rem; padding-top: 0.75rem; border-top: 1px solid var(--rule);
  font-size: 0.85rem; color: var(--quiet); }
@media (max-width: 40rem) {
  body { padding: 1.5rem 1rem 3rem; font-size: 16px; }
  h1 { font-size: 1.5rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 0.5rem; }
  table { font-size: 0.8rem; }
  th, td { padding: 0.3rem 0.4rem; }
  tbody th:first-child { white-space: normal; min-width: 6rem; }
  caption { position: sticky; left: 0; max-width: calc(100vw - 2rem); }
  th:first-child { position: sticky; left: 0; background: var(--paper); }
}
@media print {
  html { font-size: 10pt; }
  body { max-width: none; padding: 0; font-size: 10pt; background: none; }
  nav { display: none; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; break-inside: avoid; }
  th, td { padding: 0.15rem 0.4rem; }
  pre { white-space: pre-wrap; }
  figure, tr { break-inside: avoid; }
  h2, caption { break-after: avoid; }
}
"""


def page_style() -> str:
    return _themed("html") + _DRAWING + _PAGE


def standalone(drawing: str) -> str:
    """A drawing as a file of its own."""
    opening, rest = drawing.split(">", 1)
    opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    return f"{opening}><style>{_themed('svg')}{_DRAWING}</style>{paper}{rest}\n"


def _themed(root: str) -> str:
    """The colours as variables: light, or dark where the reader's system is, and always light on paper."""
    dark = f"@media screen and (prefers-color-scheme: dark) {{ {root} {{ {_variables('dark', _DARK)} }} }}"
    return f"{root} {{ color-scheme: light dark; {_variables('light', _LIGHT)} }}\n{dark}\n"


def _variables(theme: str, series: tuple[str, ...]) -> str:
    named = [f"--{name}: {colour};" for name, colour in _PALETTE[theme].items()]
    return " ".join([*named, *(f"--s{number}: {colour};" for number, colour in enumerate(series))])
