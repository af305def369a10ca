"""Sections on the setup: what was run, where, and how to repeat it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conadv.study.results import Result
from conadv.study.study_file import NUMBERLESS

from .conditions import TOP1, effective, show
from .document import Block, Code, Items, Listing, Paragraph, Section, Table
from .evidence import Evidence


def status(evidence: Evidence) -> Items:
    """The status of the study, for the top of the page."""
    results = evidence.results
    done = sum(result.summary is not None for result in results)
    failed = sum(result.error is not None for result in results)
    missing = len(results) - done - failed
    cells = f"{done} of {len(results)} done" if done < len(results) else f"{done}, all done"
    cells += f", {failed} failed" * bool(failed) + f", {missing} not run to their end yet" * bool(missing)
    seeds = sorted({run.values["seed"] for condition in evidence.main for run in condition.runs})
    pairs = [("Cells", cells), ("Arms", str(len({result.arm for result in results})))]
    pairs += [("Seeds", ", ".join(map(str, seeds)) or "none yet")]
    pairs += [("Data", _data(results)), ("Training", _training(results))]
    if evidence.origins:
        last = evidence.origins[-1]
        pairs.append(("Date and commit", f"{last['date']}, {last['commit'] or 'no clone'}"))
    if not evidence.timed:
        pairs.append(("Times", "left out, since other work ran beside the cells"))
    return Items(pairs)


def setup(evidence: Evidence) -> Section:
    """Machines, arms, common settings and the study file."""
    blocks: list[Block] = [Items(_origin(origin)) for origin in evidence.origins]
    if len(blocks) > 1:
        parts = "The study was run in parts, on machines or with sources that differ, oldest first:"
        blocks.insert(0, Paragraph(parts))
    blocks.append(_arms(evidence.results))
    common = _common([result.values for result in evidence.results])
    shared = _listed({key: value for key, value in common.items() if key not in NUMBERLESS})
    blocks.append(Paragraph(f"Common to all cells: {shared}."))
    if evidence.study_text:
        blocks += [Paragraph(("The study file, for ", Code("conadv sweep"), ":")), Listing(evidence.study_text)]
    return Section("setup", "Setup", blocks)


def failures(evidence: Evidence) -> Section | None:
    """Cells that failed, and their errors; None if there are none."""
    rows = [[result.name, result.error] for result in evidence.results if result.error is not None]
    caption = "Cells that failed, and their last error message."
    table = Table("table-failures", caption, ["cell", "error"], rows, frozenset({1}))
    return Section("failures", "Failed cells", [table]) if rows else None


def commands(evidence: Evidence) -> Section:
    """Every cell with its accuracy, the command that repeats it, and its commit if there are several."""
    rows = [[result.name, _accuracy(result), Code(result.command)] for result in evidence.results]
    head = ["cell", "test accuracy, %", "command"]
    if len({result.commit for result in evidence.results if result.summary is not None}) > 1:
        head.insert(2, "commit")
        for row, result in zip(rows, evidence.results, strict=True):
            row.insert(2, result.commit or "–")
    caption = (
        "Each cell: its test accuracy, and the command that repeats it, from the folder in which the sweep was run."
    )
    table = Table("commands", caption, head, rows, frozenset({2, len(head) - 1}))
    note = (
        "A command gives the same numbers again on the same machine and versions; on others they may differ in the "
        "last digits, which training magnifies."
    )
    return Section("cells", "Every cell and its command", [Paragraph(note), table])


def _accuracy(result: Result) -> str:
    if result.summary is None:
        return "failed" if result.error else "to do"
    top1 = result.metric(TOP1)
    return "–" if top1 is None else f"{top1:.2f}"


def _data(results: Sequence[Result]) -> str:
    names = [one.values.get("data.name") or one.values.get("data.path") for one in results]
    sources = ", ".join(dict.fromkeys(map(str, names)))
    sides = _several(results, "data.image_size")
    size = _several(results, "data.train_size", "{} training images")
    return ", ".join(part for part in (sources, size, f"{sides} × {sides} pixels" * bool(sides)) if part)


def _training(results: Sequence[Result]) -> str:
    forms = {"model": "{}", "optimizer.name": "{}", "batch_size": "batch {}", "epochs": "{} epochs"}
    return ", ".join(_several(results, key, form) for key, form in forms.items())


def _several(results: Sequence[Result], key: str, form: str = "{}") -> str:
    """The values of a setting, formatted; empty if no cell has one."""
    values = list(dict.fromkeys(one.values[key] for one in results if one.values.get(key) is not None))
    if all(isinstance(value, int) for value in values):
        values.sort()
    return form.format(" or ".join(show(key, value) for value in values)) if values else ""


def _origin(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    memory = f", {origin['memory_gb']} GB" if origin.get("memory_gb") else ""
    return [
        ("Date", str(origin["date"])),
        ("Machine", f"{origin['processor']}, {origin['cores']} cores{memory}, {origin['system']}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in origin["versions"].items())),
        ("Commit", str(origin["commit"] or "not run from a clone")),
    ]


def _arms(results: Sequence[Result]) -> Table:
    """The settings that distinguish the arms: equal within an arm, but not in all arms."""
    common = _common([result.values for result in results])
    rows = []
    for arm in dict.fromkeys(result.arm for result in results):
        several = [result for result in results if result.arm == arm]
        own = _common([effective(result.values) for result in several])
        grids = ", ".join(dict.fromkeys(grid for result in several for grid in result.grids))
        settings = _listed({key: value for key, value in own.items() if key not in common})
        rows.append([arm, settings, grids, str(len(several))])
    caption = "The arms: the settings that tell them apart, their grids, and the number of their cells."
    return Table("arms", caption, ["arm", "settings", "grids", "cells"], rows, frozenset({1, 2}))


def _common(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values that all of these have in common."""
    first, *rest = several
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in rest)}


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {show(key, value)}" for key, value in settings.items() if value is not None)
