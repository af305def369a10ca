"""Sections on accuracy by each setting in which otherwise equal conditions differ: batch, ε, delay, augmentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from conadv.study import paper

from .accuracy import TOP1, difference
from .blocks import Block, Figure, Section, Table
from .conditions import Condition, compared_settings, show, word
from .drawing import Axis, Point, Series, line_chart
from .evidence import Evidence

_TITLES = {
    "attack.epsilon": ("epsilon", "Accuracy by ε"),
    "delay": ("delay", "Accuracy by delay"),
    "batch_size": ("batch-size", "Accuracy by batch size"),
    "data.augment": ("augmentation", "With and without AutoAugment"),
}
# As the paper has them first, and the rest after them.
_ORDER = ("batch_size", "data.augment", "attack.epsilon", "delay")

_GAIN = "Minus vanilla: difference in points from vanilla with the same data, model, batch and seed."
# So many arms have their accuracies and differences in one table.
_FEW = 2

Family = Sequence[Condition]


def setting_sections(evidence: Evidence) -> list[Section]:
    found = compared_settings(evidence.main)
    keys = [*(key for key in _ORDER if key in found), *(key for key in found if key not in _ORDER)]
    return [_section(evidence, key, found[key]) for key in keys]


def _section(evidence: Evidence, key: str, rows: Sequence[Family]) -> Section:
    slug, title = _TITLES.get(key, (f"by-{key.replace('.', '-').replace('_', '-')}", f"Accuracy by {word(key)}"))
    names = family_names(rows, key)
    blocks: list[Block] = [*_tables(evidence, slug, key, rows, names)]
    numeric = all(isinstance(one.settings[key], int | float) for row in rows for one in row)
    if numeric and max(map(len, rows)) > 2:
        blocks.append(_figure(slug, key, rows, names))
    return Section(slug, title, blocks)


def family_names(rows: Sequence[Family], key: str) -> list[str]:
    """What rows are called: the arm that most of a row's conditions have, and what tells it from rows of that arm."""
    heads = [_head(row) for row in rows]
    names = []
    for head in heads:
        alike = [other for other in heads if other.arm == head.arm]
        keys = [
            other
            for other in head.settings
            if other not in (key, "chunk_size") and len({one.settings.get(other) for one in alike}) > 1
        ]
        names.append(", ".join([head.arm, *(f"{word(other)} {show(other, head.settings[other])}" for other in keys)]))
    return names


def _head(row: Family) -> Condition:
    """Of the arm that most have; of several, of the shorter name, and then the later one."""
    counts = Counter(condition.arm for condition in row)
    places = range(len(row))
    return row[max(places, key=lambda place: (counts[row[place].arm], -len(row[place].arm), place))]


def _tables(evidence: Evidence, slug: str, key: str, rows: Sequence[Family], names: Sequence[str]) -> list[Table]:
    """Accuracies, and differences from vanilla where it is there to be compared with."""
    values = _values(key, rows)
    accuracies = [
        [name, *(_accuracy(_at(row, key, value)) for value in values)] for name, row in zip(names, rows, strict=True)
    ]
    gains = _gains(evidence, key, rows, names)
    shown = ["no augmentation" if (key, value) == ("data.augment", "none") else show(key, value) for value in values]
    caption = f"Test accuracy in percent by {word(key)}, everything else equal; mean ± sample standard deviation (n)."
    if len(values) > len(rows) and len(rows) <= _FEW:  # a row for each value: long rather than wide
        head, *body = zip([word(key), *shown], *accuracies, *gains, strict=True)
        return [Table(f"table-{slug}", f"{caption} {_GAIN}" if gains else caption, head, body)]
    head = ("arm", *(value if key == "data.augment" else f"{word(key)} {value}" for value in shown))
    tables = [Table(f"table-{slug}", caption, head, accuracies)]
    if gains:
        told = f"The same as differences, by {word(key)}. {_GAIN}"
        tables.append(Table(f"table-{slug}-gain", told, head, gains))
    return tables


def _gains(evidence: Evidence, key: str, rows: Sequence[Family], names: Sequence[str]) -> list[list[str]]:
    """The rows in which something differs from vanilla."""
    titles = [f"{name} minus vanilla" for name in names] if len(rows) > 1 else ["minus vanilla"]
    gains = [
        [title, *(_gain(evidence, _at(row, key, value)) for value in _values(key, rows))]
        for title, row in zip(titles, rows, strict=True)
    ]
    return [row for row in gains if any(entry != "–" for entry in row[1:])]


def _values(key: str, rows: Sequence[Family]) -> list[Any]:
    """Each value once, numbers by size; texts stay in the order of the study."""
    values = list(dict.fromkeys(condition.settings[key] for row in rows for condition in row))
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def _at(row: Family, key: str, value: Any) -> Condition | None:
    return next((condition for condition in row if condition.settings[key] == value), None)


def _accuracy(condition: Condition | None) -> str:
    top1 = condition.figure(TOP1) if condition else None
    return f"{top1.text()} ({top1.n})" if top1 else "–"


def _gain(evidence: Evidence, condition: Condition | None) -> str:
    of = difference(evidence, condition) if condition else None
    return f"{of.text(signed=True)} ({of.n})" if of else "–"


def _figure(slug: str, key: str, rows: Sequence[Family], names: Sequence[str]) -> Figure:
    is_radius = key == "attack.epsilon"
    series = [Series(name, _points(row, key)) for name, row in zip(names, rows, strict=True)]
    ticks = [show(key, value).removesuffix("/255" if is_radius else "") for value in _values(key, rows)]
    axis = Axis(f"{word(key)}, in 255ths" if is_radius else word(key), at_values=True, tick_names=ticks)
    drawings = [line_chart(f"{slug}-ours", f"Test accuracy by {word(key)}", series, axis, Axis("test accuracy, %"))]
    caption = f"Test accuracy by {word(key)}: means, and one sample standard deviation where there are several seeds."
    if is_radius:
        drawings.append(_paper_by_epsilon())
        caption += " First this study, then the paper's ConAdv on ImageNet at three batch sizes (its table 5)."
    return Figure(f"figure-{slug}", caption, drawings)


def _points(row: Family, key: str) -> list[Point]:
    known = [(condition, condition.figure(TOP1)) for condition in row]
    return [
        Point(float(one.settings[key]), top1.mean, top1.deviation, f"{show(key, one.settings[key])}: {top1.text(2)}")
        for one, top1 in known
        if top1 is not None
    ]


def _paper_by_epsilon() -> str:
    series = [
        Series(f"batch {batch}k", [Point(level, top1) for level, top1 in zip(paper.EPSILONS, figures, strict=True)])
        for (method, batch), figures in paper.TOP1_BY_EPSILON.items()
        if method == paper.CONADV
    ]
    axis = Axis("ε, in 255ths (the paper)", at_values=True, tick_names=[str(level) for level in paper.EPSILONS])
    return line_chart("epsilon-paper", "The paper's test accuracy by ε", series, axis, Axis("test accuracy, %"))
