"""The section on learning rates: the whole grid that was tried, and what was chosen from it."""

from __future__ import annotations

from collections.abc import Sequence

from conadv.study.results import Result, is_tuning, is_tuning_grid

from .blocks import Block, Figure, Paragraph, Section, Table
from .conditions import RATE, Condition, conditions, labels, show
from .drawing import Axis, Point, Series, line_chart
from .evidence import Evidence


def rate_section(evidence: Evidence) -> Section | None:
    """None where a study tried one learning rate alone."""
    results = tuning_results(evidence.results)
    rows = _rows(conditions(results))
    if all(len(row) == 1 for _, row in rows):
        return None
    rates = sorted({condition.settings[RATE] for _, row in rows for condition in row})
    table = Table(
        "rates",
        _caption(evidence, results),
        ["arm", *(f"rate {show(RATE, rate)}" for rate in rates)],
        [[name, *(_entry(row, rate, _chosen(evidence, row)) for rate in rates)] for name, row in rows],
    )
    blocks: list[Block] = [table, *_figure(rows)]
    edges = [name for name, row in rows if _best_at_edge(row)]
    if edges:
        told = "The best rate lies at the edge of the grid for"
        blocks.append(Paragraph(f"{told} **{'; '.join(edges)}**: a rate beyond it may do better."))
    return Section("learning-rates", "Learning rates", blocks)


def tuning_results(results: Sequence[Result]) -> list[Result]:
    """The cells called tuning; where a study has none, all of them."""
    tuning = [result for result in results if any(map(is_tuning_grid, result.grids))]
    return tuning or list(results)


def _rows(several: Sequence[Condition]) -> list[tuple[str, list[Condition]]]:
    """Conditions that differ in the learning rate alone."""
    rows: dict[tuple[object, ...], list[Condition]] = {}
    for condition in several:
        rest = tuple((key, value) for key, value in condition.settings.items() if key != RATE)
        rows.setdefault((condition.arm, rest), []).append(condition)
    names = labels([row[0] for row in rows.values()])
    return [
        (name, sorted(row, key=lambda condition: float(condition.settings[RATE])))
        for name, row in zip(names, rows.values(), strict=True)
    ]


def _entry(row: Sequence[Condition], rate: float, chosen: float | None) -> str:
    condition = next((one for one in row if one.settings[RATE] == rate), None)
    if condition is None:
        return "–"
    top1 = condition.figure("test_top1")
    if top1 is None:
        return "failed" if condition.failed else "to do"
    lost = f", {condition.failed} failed" if condition.failed else ""
    text = f"{top1.text()} ({top1.n}{lost})"
    return f"**{text}** ✓" if rate == chosen else text


def _chosen(evidence: Evidence, row: Sequence[Condition]) -> float | None:
    """The rate at which the arm stands in the other tables."""
    alike = [one for one in evidence.main if one.arm == row[0].arm]
    exact = [
        one
        for one in alike
        if all(one.settings.get(key) == row[0].settings[key] for key in row[0].settings if key != RATE)
    ]
    return float((exact or alike)[0].settings[RATE]) if alike else None


def _caption(evidence: Evidence, results: Sequence[Result]) -> str:
    seeds = sorted({result.values["seed"] for result in results})
    told = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    separate = any(is_tuning(result) for result in results) and any(not is_tuning(one) for one in evidence.results)
    caution = (
        "" if separate else " The rate was chosen on the same runs that are reported, which flatters every arm alike."
    )
    return (
        f"Test top-1 accuracy in percent by peak learning rate ({told}); n in brackets. "
        f"✓: the rate at which the arm is reported elsewhere on this page.{caution}"
    )


def _figure(rows: Sequence[tuple[str, list[Condition]]]) -> list[Figure]:
    series = []
    for name, row in rows:
        known = [(condition, condition.figure("test_top1")) for condition in row]
        points = [
            Point(condition.settings[RATE], top1.mean, top1.deviation, f"{condition.settings[RATE]:g}: {top1.text(2)}")
            for condition, top1 in known
            if top1 is not None
        ]
        if len(points) > 1:
            series.append(Series(name, points))
    if not series:
        return []
    drawings = [
        line_chart(f"rates-{number}", "Test accuracy by learning rate", part, _axis(part), Axis("test accuracy, %"))
        for number, part in enumerate(_parts(series), 1)
    ]
    return [Figure("figure-rates", "Test accuracy by peak learning rate.", drawings)]


def _axis(series: Sequence[Series]) -> Axis:
    rates = sorted({point.x for one in series for point in one.points})
    return Axis("peak learning rate", at_values=True, tick_names=[show(RATE, rate) for rate in rates])


def _parts(series: Sequence[Series], most: int = 6) -> list[Sequence[Series]]:
    return [series[first : first + most] for first in range(0, len(series), most)]


def _best_at_edge(row: Sequence[Condition]) -> bool:
    known = [(top1.mean, number) for number, one in enumerate(row) if (top1 := one.figure("test_top1")) is not None]
    return len(row) > 2 and bool(known) and max(known)[1] in (0, len(row) - 1)
