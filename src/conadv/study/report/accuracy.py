"""Sections on accuracy: by method, and by each setting that the study varies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conadv.study import paper
from conadv.study.study_file import slugged

from .conditions import (
    RATE,
    TOP1,
    TUNED,
    Condition,
    Spread,
    compared_settings,
    described,
    show,
    varying_within_arms,
    word,
)
from .document import Block, Figure, Items, Paragraph, Section, Table
from .evidence import Evidence
from .figures import STYLES, Line, dot_plot, line_chart

_VERDICTS = (
    "More accurate than vanilla",
    "Less accurate than vanilla",
    "Not distinguishable from vanilla",
    "On one seed alone",
)

_TITLES = {
    "batch_size": ("batch-size", "Accuracy by batch size"),
    "data.augment": ("augmentation", "Accuracy by augmentation"),
    "attack.epsilon": ("epsilon", "Accuracy by ε"),
    "delay": ("delay", "Accuracy by delay"),
}
_GAIN = (
    "Minus vanilla: difference in points from vanilla with the same data, model, batch and seed; "
    "* if p < 0.05 after Holm's correction."
)
_METRICS = {TOP1: ("Test accuracy", "test accuracy, %"), "gap": ("Generalization gap", "gap, points")}
# Up to this many arms, one table has both accuracies and differences.
_FEW = 2
_LEVEL = 0.05  # significance level of corrected p-values

Family = Sequence[Condition]


def by_method(evidence: Evidence) -> Section:
    """The accuracy of each arm, and its difference from vanilla on the same seeds."""
    shown = evidence.shown
    columns = [key for key in varying_within_arms(shown) if key != "chunk_size"]
    columns += [RATE] * (len({condition.settings.get(RATE) for condition in shown}) > 1)
    numbers = ("n", "test accuracy, %", "minus vanilla, points", "95 % interval", "p, corrected")
    caption = (
        "Test accuracy (top-1): mean ± sample standard deviation over n seeds. The difference is taken seed by seed "
        "from the vanilla runs with the same data, model and batch, with its 95 % interval by Student's t, and the "
        f"p-value of no difference, corrected by Holm's method (comparisons on this page: {evidence.comparisons}). A "
        "difference is over n seeds, unless it gives its own number in brackets."
    )
    if any(len(condition.runs) == 1 for condition in shown):
        caption += " Where n is 1 there is no spread to give, and nothing can be concluded."
    table = Table(
        "accuracy",
        caption,
        ["arm", *map(word, columns), *numbers],
        [_row(evidence, condition, columns) for condition in shown],
    )
    return Section("results", "Accuracy by method", [table, *_verdicts(evidence), _dots(evidence)])


def _row(evidence: Evidence, condition: Condition, columns: Sequence[str]) -> list[str]:
    top1, gain = condition.metric(TOP1), evidence.gain(condition)
    settings = [show(key, condition.settings[key]) if key in condition.settings else "–" for key in columns]
    p_value = evidence.p_value(condition)
    corrected = "–" if p_value is None else f"{p_value:.2g}" if p_value >= 0.001 else "< 0.001"
    fewer = gain is not None and gain.n < len(condition.runs)  # seeds that vanilla does not have
    points = "–" if gain is None else gain.text_n(signed=True) if fewer else gain.text(signed=True)
    difference = [points, gain.interval_text() if gain else "–", corrected]
    if evidence.is_baseline(condition):
        difference = ["baseline", "", ""]
    return [condition.arm, *settings, _n(condition), top1.text() if top1 else "–", *difference]


def _n(condition: Condition) -> str:
    """The number of finished runs, and of those that failed or have not run."""
    counts = {"failed": condition.failed, "to do": condition.missing}
    lost = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{len(condition.runs)} ({lost})" if lost else str(len(condition.runs))


def _verdicts(evidence: Evidence) -> list[Items | Paragraph]:
    """Which differences are significant after the correction for multiple comparisons."""
    verdicts: dict[str, list[str]] = {verdict: [] for verdict in _VERDICTS}
    for condition in evidence.shown:
        if gain := evidence.gain(condition):
            p_value = evidence.p_value(condition)
            place = 3 if p_value is None else 2 if p_value >= _LEVEL else 0 if gain.mean > 0 else 1
            verdicts[_VERDICTS[place]].append(evidence.name(condition))
    blocks: list[Items | Paragraph] = []
    if pairs := [(verdict, "; ".join(names)) for verdict, names in verdicts.items() if names]:
        blocks.append(Items(pairs))
    compared = sum(len(verdicts[verdict]) for verdict in _VERDICTS[:3])
    if compared > 1:
        blocks.append(
            Paragraph(
                "By whether the corrected p-value is below 0.05: without any effect, that happens for one or more of "
                f"the {evidence.comparisons} comparisons with a probability of 5 % at the most. With few seeds only a "
                "large difference passes: not distinguishable does not mean equal. Each interval is for one comparison "
                "alone."
            )
        )
    return blocks


def _dots(evidence: Evidence) -> Figure:
    known = [(one, top1) for one in evidence.shown if (top1 := one.metric(TOP1))]
    rows = [(evidence.name(one), list(one.by_seed(TOP1).values()), top1) for one, top1 in known]
    drawing = dot_plot("accuracy-by-arm", "Test accuracy of every arm", rows, "test accuracy, %")
    caption = "Test accuracy of each run (hollow), their mean (filled) and one sample standard deviation (bar)."
    return Figure("figure-accuracy", caption, [drawing] if rows else [])


# By setting


def by_setting(evidence: Evidence) -> list[Section]:
    """One section per setting that the study varies: first those of the paper, then the others."""
    found = compared_settings(evidence.main)
    keys = [*(key for key in _TITLES if key in found), *(key for key in found if key not in _TITLES)]
    arms = list(dict.fromkeys(one.arm for one in evidence.main))

    def order(row: Family) -> tuple[int, int]:
        return min(arms.index(one.arm) for one in row), row[0].settings["batch_size"]

    return [_section(evidence, key, sorted(found[key], key=order)) for key in keys]


def _section(evidence: Evidence, key: str, rows: Sequence[Family]) -> Section:
    slug, title = _TITLES.get(key, (f"by-{slugged(key.replace('.', '-'))}", f"Accuracy by {word(key)}"))
    names = _family_names(rows, key)
    blocks: list[Block] = [*_tables(evidence, slug, key, rows, names)]
    if _is_numeric(_values(key, rows)) and max(map(len, rows)) > 2:
        blocks.append(_figure(slug, key, rows, names))
    return Section(slug, title, blocks)


def _family_names(rows: Sequence[Family], key: str) -> list[str]:
    """A name for each row: its most frequent arm, and what distinguishes it from other rows of that arm.

    If rows differ in the batch, each name has it.
    """
    heads = []
    for row in rows:
        counts = Counter(one.arm for one in row)  # in a tie, the arm with the shorter name; of that, the last
        head = max(reversed(row), key=lambda one: (counts[one.arm], -len(one.arm)))
        # Arms that differ in a number alone, such as "delay 1" and "delay 2", name no row: the method does.
        numbered = len(counts) > 1 and len({re.sub(r"[\d./]+", "", arm) for arm in counts}) == 1
        heads.append(replace(head, arm=head.settings["method"]) if numbered else head)
    batches = {head.settings["batch_size"] for head in heads}
    names = []
    for head in heads:
        alike = [other.settings for other in heads if other.arm == head.arm]
        keys = [other for other in head.settings if other not in (key, "chunk_size", *TUNED)]
        varied = {other for other in keys if len({one.get(other) for one in alike}) > 1}
        varied |= {"batch_size"} if key != "batch_size" and len(batches) > 1 else set()
        names.append(described(head, [other for other in keys if other in varied]))
    return names


def _tables(evidence: Evidence, slug: str, key: str, rows: Sequence[Family], names: Sequence[str]) -> list[Table]:
    """Accuracies, and differences from vanilla if the study has it."""
    values = _values(key, rows)
    accuracies, gains = [], []
    for name, row in zip(names, rows, strict=True):
        by_value = {condition.settings[key]: condition for condition in row}
        found = [by_value.get(value) for value in values]
        top1 = [one.metric(TOP1) if one else None for one in found]
        accuracies.append([name, *(of.text_n() if of else "–" for of in top1)])
        gain = [evidence.gain(one) if one else None for one in found]
        if any(gain):
            baselines = {base.arm for one in row if (base := evidence.baseline(one)) and base is not one}
            minus = f"minus {baselines.pop() if len(baselines) == 1 else 'vanilla'}"
            title = f"{name} {minus}" if len(rows) > 1 else minus
            gains.append([title, *(_marked(evidence, one, of) for one, of in zip(found, gain, strict=True))])
    shown = ["no augmentation" if (key, value) == ("data.augment", "none") else show(key, value) for value in values]
    rates = any(len({one.settings[RATE] for one in row}) > 1 for row in rows)
    equal = "everything else but the learning rate equal" if rates else "everything else equal"
    caption = f"Test accuracy in percent by {word(key)}, {equal}; mean ± sample standard deviation (n)."
    if len(values) > len(rows) and len(rows) <= _FEW:  # one row per value: long rather than wide
        head, *body = zip([word(key), *shown], *accuracies, *gains, strict=True)
        return [Table(f"table-{slug}", f"{caption} {_GAIN}" if gains else caption, head, body)]
    head = ("arm", *(value if key == "data.augment" else f"{word(key)} {value}" for value in shown))
    tables = [Table(f"table-{slug}", caption, head, accuracies)]
    if gains:
        tables.append(Table(f"table-{slug}-gain", f"The same as differences, by {word(key)}. {_GAIN}", head, gains))
    return tables


def _marked(evidence: Evidence, condition: Condition | None, gain: Spread | None) -> str:
    """A difference, with a star if it is significant after the correction."""
    if condition is None or gain is None:
        return "–"
    p_value = evidence.p_value(condition)
    return gain.text_n(signed=True) + " *" * (p_value is not None and p_value < _LEVEL)


def _values(key: str, rows: Sequence[Family]) -> list[Any]:
    """The distinct values; numbers are sorted, texts keep the order of the study."""
    values = list(dict.fromkeys(condition.settings[key] for row in rows for condition in row))
    return sorted(values) if _is_numeric(values) else values


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _figure(slug: str, key: str, rows: Sequence[Family], names: Sequence[str]) -> Figure:
    drawings = [setting_chart(f"{slug}-ours", key, list(zip(names, rows, strict=True)))]
    bars = "their 95 % intervals" if key == "batch_size" else "one sample standard deviation"
    caption = f"Test accuracy by {word(key)}: means, and {bars} where there are several seeds."
    if len(rows) > STYLES:
        caption += f" The {STYLES} arms with the most values; the table has all."
    if key == "attack.epsilon":
        drawings.append(_paper_by_epsilon())
        caption += " First this study, then the paper's ConAdv on ImageNet at three batch sizes (its table 5)."
    return Figure(f"figure-{slug}", caption, drawings)


def setting_chart(slug: str, key: str, families: Sequence[tuple[str, Family]], metric: str = TOP1) -> str:
    """Plot a metric against a setting, one line per family, with 95 % intervals for the batch size, else deviations.

    Of more families than there are styles of lines, those with the most values are drawn.
    """
    chosen = sorted(families, key=lambda family: -len(family[1]))[:STYLES]
    lines = []
    for name, row in [family for family in families if family in chosen]:
        known = [(condition.settings[key], of) for condition in row if (of := condition.metric(metric))]
        bars = [of.half if key == "batch_size" else of.deviation for _, of in known]
        lines.append(Line(name, [x for x, _ in known], [of.mean for _, of in known], bars))
    title, label = _METRICS[metric]
    axis = {"attack.epsilon": "ε, in 255ths", RATE: "peak learning rate"}.get(key, word(key))
    suffix = "/255" if key == "attack.epsilon" else ""
    ticks = {x: show(key, x).removesuffix(suffix) for x in sorted({x for line in lines for x in line.x})}
    return line_chart(slug, f"{title} by {word(key)}", lines, axis, label, ticks)


def by_batch(evidence: Evidence, slug: str, metric: str) -> str | None:
    """Plot a metric against the batch size; None if fewer than three are compared."""
    key, rows = "batch_size", compared_settings(evidence.main).get("batch_size", [])
    if not rows or max(map(len, rows)) <= _FEW:
        return None
    return setting_chart(slug, key, list(zip(_family_names(rows, key), rows, strict=True)), metric)


def _paper_by_epsilon() -> str:
    lines = [
        Line(f"batch {batch}k", paper.EPSILONS, top1)
        for (method, batch), top1 in paper.TOP1_BY_EPSILON.items()
        if method == paper.CONADV
    ]
    ticks = {float(level): str(level) for level in paper.EPSILONS}
    label = "ε, in 255ths (the paper)"
    return line_chart("epsilon-paper", "The paper's test accuracy by ε", lines, label, "test accuracy, %", ticks)
