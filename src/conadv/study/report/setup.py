"""Sections on how the figures came about: what was run, where, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conadv.study.cells import NUMBERLESS
from conadv.study.results import Result

from .blocks import Block, Items, Listing, Paragraph, Section, Table
from .conditions import effective, show
from .evidence import Evidence


def status(evidence: Evidence) -> Items:
    """How much of the study is there, for the head of the page."""
    results = evidence.results
    done = sum(result.summary is not None for result in results)
    failed = sum(result.error is not None for result in results)
    missing = len(results) - done - failed
    cells = f"{done} of {len(results)} done" if done < len(results) else f"{done}, all done"
    cells += f", {failed} failed" * bool(failed) + f", {missing} not run to their end yet" * bool(missing)
    seeds = {run.values["seed"] for condition in evidence.main for run in condition.runs}
    pairs = [("Cells", cells), ("Arms", str(len({result.arm for result in results}))), ("Seeds", _seeds(seeds))]
    pairs += [("Data", _data(results)), ("Training", _training(results))]
    if evidence.origins:
        pairs.append(
            ("Date and commit", f"{evidence.origins[-1]['date']}, {evidence.origins[-1]['commit'] or 'no clone'}")
        )
    return Items(pairs)


def setup_section(evidence: Evidence) -> Section:
    blocks: list[Block] = [Items(pair) for pair in map(_origin, evidence.origins)]
    if len(evidence.origins) > 1:
        blocks.insert(
            0, Paragraph("The study was run in parts, on machines or with sources that differ, oldest first:")
        )
    blocks.append(_arms(evidence.results))
    common = {
        key: value
        for key, value in _common([result.values for result in evidence.results]).items()
        if key not in NUMBERLESS
    }
    told = ", ".join(f"{key} {show(key, value)}" for key, value in common.items() if value is not None)
    blocks.append(Paragraph(f"Common to all cells: {told}."))
    if evidence.study_text:
        blocks += [Paragraph("The study file, for `conadv sweep`:"), Listing(evidence.study_text)]
    return Section("setup", "Setup", blocks)


def failure_section(evidence: Evidence) -> Section | None:
    rows = [[result.name, result.error] for result in evidence.results if result.error is not None]
    if not rows:
        return None
    caption = "Cells that came to no result, and what they said last."
    return Section(
        "failures", "Failed cells", [Table("table-failures", caption, ["cell", "error"], rows, frozenset({1}))]
    )


def command_section(evidence: Evidence) -> Section:
    """Every cell with its figure and the command that repeats it."""
    rows = [[result.name, _accuracy(result), _code(result.command)] for result in evidence.results]
    caption = (
        "Each cell: its test accuracy, and the command that repeats it, from the folder in which the sweep was run."
    )
    table = Table("commands", caption, ["cell", "test accuracy, %", "command"], rows, frozenset({2}))
    note = (
        "A command gives the same figures again on the same machine and versions; on others they may differ in the "
        "last digits, which training magnifies."
    )
    return Section("cells", "Every cell and its command", [Paragraph(note), table])


def _accuracy(result: Result) -> str:
    if result.summary is None:
        return "failed" if result.error else "to do"
    return f"{result.summary['test_top1']:.2f}"


def _code(text: str) -> str:
    return text if "`" in text else f"`{text}`"


def _seeds(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds))) or "none yet"


def _data(results: Sequence[Result]) -> str:
    sources = ", ".join(
        dict.fromkeys(str(one.values.get("data.name") or one.values.get("data.path")) for one in results)
    )
    sides = _several(results, "data.image_size")
    size = _several(results, "data.train_size", "{} training images")
    return ", ".join(part for part in (sources, size, f"{sides} × {sides} pixels" * bool(sides)) if part)


def _training(results: Sequence[Result]) -> str:
    forms = {"model": "{}", "optimizer.name": "{}", "batch_size": "batch {}", "epochs": "{} epochs"}
    return ", ".join(_several(results, key, form) for key, form in forms.items())


def _several(results: Sequence[Result], key: str, form: str = "{}") -> str:
    """The values of a setting, put into a form; empty where it is none for all."""
    values = list(dict.fromkeys(result.values[key] for result in results if result.values.get(key) is not None))
    if all(isinstance(value, int) for value in values):
        values.sort()
    return form.format(" or ".join(show(key, value) for value in values)) if values else ""


def _origin(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory = f", {origin['memory_gb']} GB" if origin.get("memory_gb") else ""
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    return [
        ("Date", str(origin["date"])),
        ("Machine", f"{origin['processor']}, {origin['cores']} cores{memory}, {origin['system']}"),
        ("Versions", versions),
        ("Commit", str(origin["commit"] or "not run from a clone")),
    ]


def _arms(results: Sequence[Result]) -> Table:
    """What tells the arms apart: each setting that is the same within an arm and not over all of them."""
    arms: dict[str, list[Result]] = {}
    for result in results:
        arms.setdefault(result.arm, []).append(result)
    common = _common([result.values for result in results])
    rows = []
    for arm, several in arms.items():
        own = {
            key: value
            for key, value in _common([effective(result.values) for result in several]).items()
            if key not in common and value is not None
        }
        grids = ", ".join(dict.fromkeys(grid for result in several for grid in result.grids))
        told = ", ".join(f"{key} {show(key, value)}" for key, value in own.items())
        rows.append([arm, told, grids, str(len(several))])
    caption = "The arms: the settings that tell them apart, the grids that they take part in, and their cells."
    return Table("arms", caption, ["arm", "settings", "grids", "cells"], rows, frozenset({1, 2}))


def _common(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values that all of these have."""
    first, *rest = several
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in rest)}
