"""Sections on what the methods cost and how far training and test accuracy lie apart."""

from __future__ import annotations

from .blocks import Section, Table
from .conditions import Condition, baseline
from .evidence import Evidence
from .spread import Spread


def gap_section(evidence: Evidence) -> Section:
    head = ["arm", "n", "training accuracy, %", "test accuracy, %", "gap, points"]
    rows = [
        [
            evidence.name(one),
            str(len(one.runs)),
            *(_text(one.figure(name)) for name in ("train_top1", "test_top1", "gap")),
        ]
        for one in evidence.shown
    ]
    caption = (
        "Generalization gap: accuracy on the training images, without augmentation, minus that on the test images. "
        "Mean ± sample standard deviation over n seeds."
    )
    return Section("gap", "Generalization gap", [Table("table-gap", caption, head, rows)])


def time_section(evidence: Evidence) -> Section:
    head = ["arm", "n", "training, s", "a step, ms", "images/s", "time a step, relative to vanilla"]
    rows = [_time_row(evidence, one) for one in evidence.shown]
    caption = (
        "Time of training, one process doing everything: seconds of the whole run, milliseconds a step, clean images a "
        "second, and time a step relative to vanilla with the same seed. Cells ran side by side, each on cores of its "
        "own, on a machine that may have had other work: the ratios tell more than the seconds, and neither is a "
        "benchmark."
    )
    return Section("time", "Time and throughput", [Table("table-time", caption, head, rows)])


def step_ratio(evidence: Evidence, condition: Condition) -> Spread | None:
    """Time a step relative to vanilla's, over common seeds."""
    plain = baseline(evidence.main, condition)
    return None if plain is None else plain.over(condition, "images_per_second")


def _time_row(evidence: Evidence, condition: Condition) -> list[str]:
    seconds, speed = condition.figure("seconds"), condition.figure("images_per_second")
    steps = condition.figure("steps")
    step = 1000 * seconds.mean / steps.mean if seconds and steps and steps.mean else None
    is_baseline = baseline(evidence.main, condition) is condition
    ratio = None if is_baseline else step_ratio(evidence, condition)
    return [
        evidence.name(condition),
        str(len(condition.runs)),
        _text(seconds, 1 if seconds and seconds.mean < 100 else 0),
        f"{step:.{0 if step >= 100 else 1}f}" if step is not None else "–",
        f"{speed.mean:,.0f}" if speed else "–",
        "1" if is_baseline else _text(ratio, 2),
    ]


def _text(of: Spread | None, digits: int = 1) -> str:
    return of.text(digits) if of else "–"
