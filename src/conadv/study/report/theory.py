"""Sections on the theory: staleness (runs with --diagnose) and sharpness (runs after `conadv analyze`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from conadv.study.results import Result, fits, is_number, keep, read_saved

from .conditions import Condition, Spread, labels, spread
from .document import Block, Figure, Paragraph, Section, Table
from .evidence import Evidence
from .figures import dot_plot
from .training import Curves, curve_figure, curve_of, mean_curve

# Staleness

STALENESS = {
    "stale_agreement": "share of signs in common",
    "stale_distance": "distance of the twins",
    "weight_drift": "drift of the weights",
    "lemma1_constant": "constant of Lemma 1",
    "fresh_gain": "loss, fresh minus stale",
    "gradient_square": "squared gradient norm",
}


def staleness_curves(evidence: Evidence) -> Curves:
    """The mean curves of the metrics of --diagnose, by metric and arm."""
    curves: Curves = {kind: {} for kind in STALENESS}
    for condition in evidence.shown:
        runs = [[{**line, **_derived(line)} for line in evidence.metrics(run)] for run in condition.runs]
        for kind in STALENESS:
            if curve := mean_curve([curve_of(lines, kind) for lines in runs]):
                curves[kind][evidence.name(condition)] = curve
    return {kind: of for kind, of in curves.items() if of}


def _derived(line: Mapping[str, Any]) -> dict[str, float]:
    names = ("fresh_loss", "stale_loss", "gradient_norm")
    if not all(is_number(line.get(name)) for name in names):
        return {}
    fresh, stale, norm = (float(line[name]) for name in names)
    variance = line.get("gradient_variance")
    return {"fresh_gain": fresh - stale, "gradient_square": norm**2 - (float(variance) if is_number(variance) else 0)}


def staleness(curves: Curves) -> Section | None:
    """How far stale twins are from fresh ones; None if no run has measured it."""
    if not curves.get("stale_distance"):
        return None
    head = ["arm", *STALENESS.values()]
    rows = [[arm, *(_mean_of(curves, kind, arm) for kind in STALENESS)] for arm in curves["stale_distance"]]
    caption = (
        "Stale twins, generated with the weights of some steps ago, against fresh ones of the same images; means over "
        "the training and the seeds. Distance: L2, pixels in [0, 1]. Constant of Lemma 1: the largest distance of an "
        "image, divided by the drift of the weights; if the lemma described this attack, it would be about the same "
        "throughout. Squared gradient norm: of the loss with fresh twins, without the variance of the batch where "
        "this is known (Theorem 1)."
    )
    figures = [curve_figure(kind, what, curves[kind]) for kind, what in STALENESS.items() if curves.get(kind)]
    return Section("staleness", "Staleness", [Table("table-staleness", caption, head, rows), *figures])


def _mean_of(curves: Curves, kind: str, arm: str) -> str:
    curve = curves.get(kind, {}).get(arm)
    return f"{fmean(y for _, y in curve):.3g}".replace("-", "−") if curve else "–"


# Sharpness

SHARPNESS = "sharpness.json"
_ANALYSIS = "analysis.json"
_COLUMNS = {
    "eigenvalue": "largest eigenvalue λ",
    "relative": "λ·‖θ‖²",
    "trace": "trace",
    "rise": "worst loss − loss",
    "gradient_norm": "gradient norm",
    "test_top1": "test accuracy, %",
    "robust_top1": "robust accuracy, %",
}
Numbers = dict[str, dict[str, float]]
"""By branch and name."""
Analyses = dict[str, Numbers]
"""By cell."""


def read_analyses(evidence: Evidence) -> Analyses:
    """The numbers of analysis.json by cell; saved, so that the report can be written again without the run folders."""
    runs = [run for condition in evidence.main for run in condition.runs]
    found = {run.cell: numbers for run in runs if (numbers := _numbers(evidence.folder, run))}
    return keep(evidence.folder / SHARPNESS, found, _all_checked)


def _numbers(folder: Path, run: Result) -> Numbers:
    """The measurements at the end of a run; empty if an earlier checkpoint was analyzed."""

    def branches(content: Any) -> Numbers:
        if content["about"]["step"] != run.metric("steps"):
            return {}
        names = dict.fromkeys(name.partition(".")[0] for name in content["parts"])
        return {branch: _branch(content["parts"], branch) for branch in names}

    path = folder / "runs" / run.cell / _ANALYSIS
    return read_saved(path, branches, {}, "remove it, or run conadv analyze --again")


def _branch(parts: Mapping[str, Any], branch: str) -> dict[str, float]:
    sharp, accuracy = (parts.get(f"{branch}.{kind}", {}) for kind in ("sharpness", "accuracy"))
    numbers = {name: accuracy[name] for name in ("test_top1", "robust_top1") if name in accuracy}
    if sharp:
        largest = sharp["eigenvalues"][0]
        numbers |= {"eigenvalue": largest, "relative": largest * sharp["weight_norm"] ** 2, "trace": sharp["trace"]}
        numbers |= {"rise": sharp["worst_loss"] - sharp["loss"], "gradient_norm": sharp["gradient_norm"]}
    return _checked(numbers)


def _checked(numbers: Any) -> dict[str, float]:
    if not fits(numbers, dict[str, float]) or not numbers.keys() <= _COLUMNS.keys():
        raise ValueError("not the numbers of an analysis")
    return dict(numbers)


def _all_checked(content: Any) -> Analyses:
    return {cell: {name: _checked(of) for name, of in branches.items()} for cell, branches in content.items()}


def sharpness(evidence: Evidence) -> Section | None:
    """Sharpness and robust accuracy of the trained networks, by branch; None if no run was analyzed."""
    analyses = read_analyses(evidence)
    analyzed = [one for one in evidence.main if any(run.cell in analyses for run in one.runs)]
    if not analyzed:
        return None
    blocks: list[Block] = [
        Paragraph(
            "At the end of the training, on a fixed sample, each BatchNorm branch with its running statistics; the "
            "adversarial branch on twins. A flat minimum has a small λ; λ·‖θ‖² does not change with the scale of the "
            "weights in front of BatchNorm, so it is the one to compare."
        )
    ]
    for branch in dict.fromkeys(branch for numbers in analyses.values() for branch in numbers):
        blocks += _branch_blocks(branch, analyzed, analyses)
    return Section("sharpness", "Sharpness", blocks)


def _branch_blocks(branch: str, analyzed: Sequence[Condition], analyses: Analyses) -> list[Block]:
    rows, dots = [], []
    for name, one in zip(labels(analyzed), analyzed, strict=True):
        found = [analyses.get(run.cell, {}).get(branch, {}) for run in one.runs]
        values = {column: [numbers[column] for numbers in found if column in numbers] for column in _COLUMNS}
        if n := max(map(len, values.values())):
            rows.append([name, str(n), *(_entry(spread(values[column])) for column in _COLUMNS)])
        if of := spread(values["relative"]):
            dots.append((name, values["relative"], of))
    caption = f"Sharpness of the {branch} branch: mean ± sample standard deviation over n seeds."
    blocks: list[Block] = [Table(f"table-sharpness-{branch}", caption, ["arm", "n", *_COLUMNS.values()], rows)]
    if dots:
        drawing = dot_plot(f"sharpness-{branch}", f"Sharpness of the {branch} branch", dots, "λ·‖θ‖²")
        text = f"λ·‖θ‖² of the {branch} branch: each run (hollow), their mean and one sample standard deviation."
        blocks.append(Figure(f"figure-sharpness-{branch}", text, [drawing]))
    return blocks


def _entry(of: Spread | None) -> str:
    """Mean ± deviation with two significant digits of the deviation; without one, three of the mean."""
    if of is None:
        return "–"
    if not of.deviation:
        return f"{of.mean:.3g}".replace("-", "−") + " ± 0" * (of.deviation is not None)
    places = 1 - math.floor(math.log10(float(f"{of.deviation:.1e}")))
    parts = (f"{round(part, places):,.{max(places, 0)}f}" for part in (of.mean, of.deviation))
    return " ± ".join(parts).replace("-", "−")
