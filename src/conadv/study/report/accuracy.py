"""The section on accuracy by method, and what the spread allows one to say of it."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import Figure, Items, Paragraph, Section, Table
from .conditions import RATE, Condition, baseline, show, varying, varying_within_arms, word
from .drawing import Axis, Point, dot_plot
from .evidence import Evidence
from .spread import Spread

TOP1 = "test_top1"

_VERDICTS = ("More accurate than vanilla", "Less accurate than vanilla", "Not told from vanilla", "On one seed alone")


def accuracy_section(evidence: Evidence) -> Section:
    """Every arm: its accuracy, and its difference from vanilla on the same seeds."""
    columns = _columns(evidence)
    head = ["arm", *map(word, columns), "n", "test accuracy, %", "minus vanilla, points", "95 % interval"]
    rows = [_row(evidence, condition, columns) for condition in evidence.shown]
    caption = (
        "Test accuracy (top-1): mean ± sample standard deviation over n seeds. The difference is taken seed by seed "
        "from the vanilla runs with the same data, model and batch, with its 95 % interval by Student's t."
        + _spread_caveat(evidence.shown)
    )
    verdicts = _verdicts(evidence)
    return Section(
        "results",
        "Accuracy by method",
        [Table("accuracy", caption, head, rows), *_told(verdicts), _dots(evidence)],
    )


def difference(evidence: Evidence, condition: Condition) -> Spread | None:
    """Of the test accuracy from vanilla's; None for vanilla itself, or without it."""
    plain = baseline(evidence.main, condition)
    return None if plain is None or plain is condition else condition.minus(plain, TOP1)


def _row(evidence: Evidence, condition: Condition, columns: Sequence[str]) -> list[str]:
    top1, of = condition.figure(TOP1), difference(evidence, condition)
    settings = [show(key, condition.settings[key]) if key in condition.settings else "–" for key in columns]
    if baseline(evidence.main, condition) is condition:
        told = ["baseline", ""]
    else:
        told = [of.text(signed=True), of.interval_text()] if of else ["–", "–"]
    return [condition.arm, *settings, _n(condition), top1.text() if top1 else "–", *told]


def _columns(evidence: Evidence) -> list[str]:
    rate = [RATE] if varying(evidence.shown, RATE) else []
    return [*(key for key in varying_within_arms(evidence.shown) if key != "chunk_size"), *rate]


def _n(condition: Condition) -> str:
    """How many runs, and how many of those that were asked for are not there."""
    counts = {"failed": condition.failed, "to do": condition.missing}
    lost = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(condition.runs)} ({lost})" if lost else str(len(condition.runs))


def _spread_caveat(several: Sequence[Condition]) -> str:
    single = any(len(condition.runs) == 1 for condition in several)
    return " Where n is 1 there is no spread to give, and nothing can be concluded." if single else ""


def _verdicts(evidence: Evidence) -> dict[str, list[str]]:
    """What the interval of each difference says: names of conditions by verdict."""
    verdicts: dict[str, list[str]] = {verdict: [] for verdict in _VERDICTS}
    more, less, unclear, single = verdicts.values()
    for condition in evidence.shown:
        of = difference(evidence, condition)
        if of is None:
            continue
        if of.interval is None:
            single.append(evidence.name(condition))
        else:
            low, high = of.interval
            (more if low > 0 else less if high < 0 else unclear).append(evidence.name(condition))
    return verdicts


def _told(verdicts: dict[str, list[str]]) -> list[Items | Paragraph]:
    told: list[Items | Paragraph] = []
    pairs = [(verdict, "; ".join(names)) for verdict, names in verdicts.items() if names]
    if pairs:
        told.append(Items(pairs))
    compared = sum(len(names) for names in list(verdicts.values())[:3])
    if compared > 1:
        chance = 100 * (1 - 0.95**compared)
        told.append(
            Paragraph(
                "By whether the 95 % interval of the difference excludes 0. Each interval is for one comparison: of "
                f"{compared} independent ones without any effect, at least one would exclude 0 with a probability of "
                f"{chance:.0f} %."
            )
        )
    return told


def _dots(evidence: Evidence) -> Figure:
    rows = []
    for condition in evidence.shown:
        of = condition.figure(TOP1)
        points = [
            Point(figure, 0, text=f"seed {seed}: {figure:.2f} %") for seed, figure in condition.by_seed(TOP1).items()
        ]
        if of:
            rows.append((evidence.name(condition), points, of))
    drawing = dot_plot("accuracy-by-arm", "Test accuracy of every arm", rows, Axis("test accuracy, %"))
    caption = "Test accuracy of each run (hollow), their mean (filled) and one sample standard deviation (bar)."
    return Figure("figure-accuracy", caption, [drawing])
