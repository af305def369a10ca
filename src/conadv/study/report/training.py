"""Sections on training: learning rates, generalization gap, time, curves, and images with their adversarial twins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from conadv.study.results import Result, fits, is_number, is_tuning, is_tuning_grid

from .accuracy import by_batch, setting_chart
from .conditions import RATE, TOP1, Condition, Spread, conditions, labels, show, varying_within_arms
from .document import Block, Figure, Paragraph, Section, Strong, Table
from .evidence import Evidence
from .figures import Line, image_grid, line_chart

# Learning rates


def rates(evidence: Evidence) -> Section | None:
    """The learning rates that were tried and chosen; None if every arm has only one."""
    results = [one for one in evidence.results if any(map(is_tuning_grid, one.grids))] or list(evidence.results)
    rows = _rate_rows(conditions(results))
    if all(len(row) == 1 for _, row in rows):
        return None
    tried = sorted({condition.settings[RATE] for _, row in rows for condition in row})
    head = ["arm", *(f"rate {show(RATE, rate)}" for rate in tried)]
    body = [[name, *(_rate_entry(row, rate, _chosen(evidence, row)) for rate in tried)] for name, row in rows]
    blocks: list[Block] = [Table("rates", _rate_caption(evidence, results), head, body), *_rate_figure(rows)]
    if edges := [name for name, row in rows if _best_at_edge(row)]:
        before = "The best rate is at the edge of the grid for "
        blocks.append(Paragraph((before, Strong("; ".join(edges)), ": a rate beyond it may do better.")))
    return Section("learning-rates", "Learning rates", blocks)


def _rate_rows(several: Sequence[Condition]) -> list[tuple[str, list[Condition]]]:
    """Conditions that differ only in the learning rate."""
    rows: dict[tuple[object, ...], list[Condition]] = {}
    for condition in several:
        rest = tuple((key, value) for key, value in condition.settings.items() if key != RATE)
        rows.setdefault((condition.arm, rest), []).append(condition)
    names = labels([row[0] for row in rows.values()])
    ordered = [sorted(row, key=lambda condition: float(condition.settings[RATE])) for row in rows.values()]
    return list(zip(names, ordered, strict=True))


def _rate_entry(row: Sequence[Condition], rate: float, chosen: float | None) -> str:
    condition = next((one for one in row if one.settings[RATE] == rate), None)
    if condition is None:
        return "–"
    top1 = condition.metric(TOP1)
    if top1 is None:
        return "failed" if condition.failed else "to do"
    lost = f", {condition.failed} failed" if condition.failed else ""
    text = f"{top1.text()} ({top1.n}{lost})"
    return Strong(f"{text} ✓") if rate == chosen else text


def _chosen(evidence: Evidence, row: Sequence[Condition]) -> float | None:
    """The rate that the other tables use for this arm, at the batch size of the row and its other settings that vary.

    None: they do not show it. Settings in which the whole arm differs from the row, such as the data, do not count.
    """
    of_arm = [one for one in evidence.main if one.arm == row[0].arm]
    apart = varying_within_arms(of_arm)
    alike = (one for one in of_arm if all(one.settings.get(key) == row[0].settings.get(key) for key in apart))
    return next((float(one.settings[RATE]) for one in alike), None)


def _rate_caption(evidence: Evidence, results: Sequence[Result]) -> str:
    seeds = sorted({result.values["seed"] for result in results})
    caption = (
        f"Test top-1 accuracy in percent by peak learning rate (seed{'s' * (len(seeds) > 1)} "
        f"{', '.join(map(str, seeds))}); n in brackets. ✓: the rate of the arm elsewhere on this page."
    )
    separate = any(map(is_tuning, results)) and not all(map(is_tuning, evidence.results))
    caution = " The rate was chosen on the same runs that are reported, which flatters every arm alike."
    return caption if separate else caption + caution


def _rate_figure(rows: Sequence[tuple[str, list[Condition]]]) -> list[Figure]:
    lines = [(name, row) for name, row in rows if sum(one.metric(TOP1) is not None for one in row) > 1]
    parts = [lines[first : first + 6] for first in range(0, len(lines), 6)]
    drawings = [setting_chart(f"rates-{number}", RATE, part) for number, part in enumerate(parts, 1)]
    return [Figure("figure-rates", "Test accuracy by peak learning rate.", drawings)] if drawings else []


def _best_at_edge(row: Sequence[Condition]) -> bool:
    known = [(top1.mean, place) for place, one in enumerate(row) if (top1 := one.metric(TOP1))]
    return len(row) > 2 and bool(known) and max(known)[1] in (0, len(row) - 1)


# Generalization gap and time


def gap(evidence: Evidence) -> Section:
    """Training and test accuracy, and their difference."""
    head = ["arm", "n", "training accuracy, %", "test accuracy, %", "gap, points"]
    names = ("train_top1", TOP1, "gap")
    rows = [
        [evidence.name(one), str(len(one.runs)), *(_text(one.metric(name)) for name in names)] for one in evidence.shown
    ]
    caption = (
        "Generalization gap: accuracy on the training images, without augmentation, minus that on the test images. "
        "Mean ± sample standard deviation over n seeds."
    )
    blocks: list[Block] = [Table("table-gap", caption, head, rows)]
    if drawing := by_batch(evidence, "gap-by-batch", "gap"):
        caption = "Generalization gap by batch: means, and their 95 % intervals where there are several seeds."
        blocks.append(Figure("figure-gap", caption, [drawing]))
    return Section("gap", "Generalization gap", blocks)


def time(evidence: Evidence) -> Section:
    """Seconds, time per step and throughput."""
    head = ["arm", "n", "training, s", "a step, ms", "images/s", "time a step, relative to vanilla"]
    caption = (
        "Time of training, one process doing everything: seconds of the whole run, milliseconds per step, clean images "
        "per second, and time per step relative to vanilla with the same seed. Cells ran in parallel, each on cores of "
        "its own, on a machine that may have had other work: the ratios say more than the seconds, and neither is a "
        "benchmark."
    )
    rows = [_time_row(evidence, one) for one in evidence.shown]
    return Section("time", "Time and throughput", [Table("table-time", caption, head, rows)])


def _time_row(evidence: Evidence, condition: Condition) -> list[str]:
    seconds, steps, speed = (condition.metric(name) for name in ("seconds", "steps", "images_per_second"))
    step = 1000 * seconds.mean / steps.mean if seconds and steps and steps.mean else None
    return [
        evidence.name(condition),
        str(len(condition.runs)),
        _text(seconds, 1 if seconds and seconds.mean < 100 else 0),
        f"{step:.{0 if step >= 100 else 1}f}" if step is not None else "–",
        f"{speed.mean:,.0f}" if speed else "–",
        "1" if evidence.is_baseline(condition) else _text(evidence.step_ratio(condition), 2),
    ]


def _text(of: Spread | None, digits: int = 1) -> str:
    return of.text(digits) if of else "–"


# Training curves

Curve = list[tuple[float, float]]
"""Pairs of epoch and value."""
Curves = dict[str, dict[str, Curve]]
"""By what is shown and by condition."""

CURVES = "curves.json"
_SHOWN = {"loss": "clean training loss", "progress": "test accuracy, %"}
_BINS = 60
_MOST_LINES = 5


def find_curves(evidence: Evidence) -> Curves:
    """The mean curves of the conditions, from the metrics.jsonl of their runs; empty if these are gone."""
    found: Curves = {"loss": {}, "progress": {}}
    for condition in evidence.shown:
        metrics = [(run, evidence.metrics(run)) for run in condition.runs]
        found["loss"][evidence.name(condition)] = mean_curve([curve_of(lines, "clean_loss") for _, lines in metrics])
        found["progress"][evidence.name(condition)] = mean_curve([_accuracies(run, lines) for run, lines in metrics])
    found = {kind: {name: curve for name, curve in of.items() if len(curve) > 2} for kind, of in found.items()}
    return found if any(found.values()) else {}


def curves(known: Curves) -> Section | None:
    """Loss by epoch, and test accuracy if it was measured during training."""
    figures = [curve_figure(kind, what, known[kind]) for kind, what in _SHOWN.items() if known.get(kind)]
    return Section("curves", "Training curves", figures) if figures else None


def curve_figure(kind: str, what: str, curves: Mapping[str, Curve]) -> Figure:
    """Curves in drawings of a few lines each; the first curve is in every drawing."""
    lines = [Line(name, *zip(*curve, strict=True)) for name, curve in curves.items()]
    step = _MOST_LINES - 1
    parts = [[lines[0], *lines[first : first + step]] for first in range(1, len(lines), step)] or [lines]
    drawings = [
        line_chart(f"{kind}-{number}", f"{what} by epoch".capitalize(), part, "epoch", what)
        for number, part in enumerate(parts, 1)
    ]
    caption = f"{what[0].upper()}{what[1:]} by epoch, the mean over the seeds of each arm."
    if len(drawings) > 1:
        caption += f" The first arm, {lines[0].name}, is in every drawing."
    return Figure(f"figure-{kind}", caption, drawings)


def curve_of(lines: Iterable[Mapping[str, Any]], name: str) -> Curve:
    pairs = ((line.get("epoch"), line.get(name)) for line in lines)
    return [(epoch, value) for epoch, value in pairs if is_number(epoch) and is_number(value) and epoch >= 0]


def _accuracies(run: Result, lines: Sequence[Mapping[str, Any]]) -> Curve:
    """The accuracies during training, and the final one, which only the summary has."""
    curve, last = curve_of(lines, TOP1), run.metric(TOP1)
    return [*curve, *curve_of([{**lines[-1], TOP1: last}], TOP1)] if curve and last is not None else []


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of several curves, averaged in bins of equal length."""
    last = max((epoch for curve in curves for epoch, _ in curve), default=0.0) or 1.0
    parts: dict[int, Curve] = {}
    for epoch, value in (pair for curve in curves for pair in curve):
        parts.setdefault(min(_BINS - 1, int(_BINS * epoch / last)), []).append((epoch, value))
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for _, part in sorted(parts.items())]


def check_curves(saved: Any) -> Curves:
    """The content of curves.json; ValueError if it is damaged."""
    if not fits(saved, Curves):
        raise ValueError("not pairs of numbers")
    for curve in (curve for of in saved.values() for curve in of.values()):
        if not curve or any(later[0] < earlier[0] for earlier, later in pairwise(curve)):
            raise ValueError("epochs out of order")
    return dict(saved)


# Images and their twins

_ROWS = (("image", "image", "answer"), ("twin", "twin", "twin_answer"), ("perturbation", "difference", ""))
_MOST_IMAGES = 6


def pictures(evidence: Evidence) -> Section | None:
    """One gallery per arm; None if there are none."""
    drawings: dict[str, str] = {}
    damaged: list[str] = []
    for result in evidence.results:
        if result.arm not in drawings:
            try:
                if (gallery := evidence.gallery(result)) is not None:
                    drawings[result.arm] = _gallery(f"gallery-{len(drawings) + 1}", result.arm, gallery)
            except (OSError, ValueError, TypeError, LookupError, AttributeError):
                damaged.append(result.name)
    if not drawings and not damaged:
        return None
    caption = (
        "Training images, the adversarial twins that the trained network's attack makes of them, and the difference, "
        "magnified around grey. Below an image and below its twin: the network's prediction, as in evaluation; a dot "
        "marks a wrong one."
    )
    blocks: list[Block] = [Figure("figure-gallery", caption, list(drawings.values()))] if drawings else []
    if damaged:
        blocks.append(Paragraph(f"No pictures of {'; '.join(damaged)}: gallery.json is damaged."))
    return Section("gallery", "Images and their twins", blocks)


def _gallery(slug: str, arm: str, gallery: Mapping[str, Any]) -> str:
    images = gallery["images"][:_MOST_IMAGES]
    title = f"{arm}: ε = {show('attack.epsilon', gallery['epsilon'])}, difference × {gallery['magnified']:.3g}"
    rows = []
    for kind, name, answer in _ROWS:
        marks = ["" if answer and image[answer] == image["label"] else "• " for image in images]
        texts = [mark + image[answer] for mark, image in zip(marks, images, strict=True)] if answer else []
        rows.append((name, [image[kind] for image in images], texts))
    return image_grid(slug, title, rows)
