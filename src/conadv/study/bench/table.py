"""The results of benchmarks as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conadv.study.plan.table import columns

_HEADER = ("benchmark", "ratio of times", "median", "10 %", "90 %", "median within", "n", "by work", "by flops")


def render(document: Mapping[str, Any]) -> str:
    """The machine, the sizes, ratios, times and notes."""
    ratios = [entry for entry in document["results"] if "ratio" in entry]
    times = [entry for entry in document["results"] if "ratio" not in entry]
    given = "\n".join(_listed(facts) for facts in (document["machine"], *document["sizes"].values()))
    parts = [given, _ratios(ratios), _times(times), "\n".join(document["notes"])]
    return "\n\n".join(part for part in parts if part)


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def _ratios(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    legend = "10 %, 90 %: percentiles of the rounds; median within: 95 % confidence, less below 6 rounds"
    return columns([(*_HEADER, "goal", ""), *map(_ratio, entries)]) + f"\n{legend}"


def _ratio(entry: Mapping[str, Any]) -> tuple[str, ...]:
    name = entry["name"] + (" (composed)" if entry.get("composed") and not entry["name"].endswith("composed") else "")
    spread = (f"{entry[key]:.3f}" for key in ("ratio", "low", "high"))
    sure = f"{entry['median_low']:.3f} – {entry['median_high']:.3f}"
    others = (f"{entry[key]:.3f}" if key in entry else "-" for key in ("work_ratio", "flop_ratio"))
    met = {True: "met", False: "missed", None: ""}[entry.get("met")]
    return entry["benchmark"], name, *spread, sure, str(entry["n"]), *others, entry.get("goal", ""), met


def _times(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    rows = [("benchmark", "time", "ms", "10 %", "90 %", "n")]
    for entry in entries:
        a_piece = " per image" if "seconds_per_image" in entry else ""
        value = entry.get("seconds_per_image", entry.get("seconds"))
        figures = (f"{1e3 * figure:.4g}" for figure in (value, entry["low"], entry["high"]))
        rows.append((entry["benchmark"], entry["name"] + a_piece, *figures, str(entry["n"])))
    return columns(rows)
