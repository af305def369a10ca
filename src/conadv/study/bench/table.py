"""The results of benchmarks as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conadv.study.plan.table import columns

_HEADER = (
    "benchmark",
    "ratio of times",
    "median",
    "10 %",
    "90 %",
    "median within",
    "n",
    "by work",
    "by flops",
    "goal",
    "",
)


def render(document: Mapping[str, Any]) -> str:
    """Ratios, then times, then where the time of a step goes, then heartbeats."""
    ratios = [entry for entry in document["results"] if "ratio" in entry]
    times = [entry for entry in document["results"] if "ratio" not in entry]
    given = "\n".join(_listed(facts) for facts in (document["machine"], *document["sizes"].values()))
    parts = [given, _ratios(ratios), _times(times), _profile(document["profile"]), "\n".join(document["heartbeats"])]
    return "\n\n".join(part for part in parts if part)


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def _ratios(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    legend = "10 %, 90 %: percentiles of the rounds; median within: 95 % sure, less below 6 rounds"
    return columns([_HEADER, *map(_ratio, entries)]) + f"\n{legend}"


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
        a_piece = " an image" if "seconds_per_image" in entry else ""
        value = entry.get("seconds_per_image", entry.get("seconds"))
        figures = (f"{1e3 * figure:.4g}" for figure in (value, entry["low"], entry["high"]))
        rows.append((entry["benchmark"], entry["name"] + a_piece, *figures, str(entry["n"])))
    return columns(rows)


def _profile(entries: Sequence[Mapping[str, Any]]) -> str:
    """A column a part that takes any time at all."""
    if not entries:
        return ""
    parts = [part for part in entries[0]["seconds"] if any(entry["seconds"][part] for entry in entries)]
    rows = [("ms a step, profiled", "on", *parts)]
    rows += [
        (entry["name"], entry["place"], *(f"{1e3 * entry['seconds'][part]:.1f}" for part in parts)) for entry in entries
    ]
    return columns(rows)
