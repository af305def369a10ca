"""The section on cost: accuracy against work, and which conditions are dominated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from conadv.core.catalog import METHODS
from conadv.core.roles import Role

from .conditions import TOP1, Condition, Spread, context, labels, show
from .document import Block, Figure, Section, Table
from .evidence import Evidence
from .figures import frontier_chart

_FEWEST = 3  # conditions, else there is no section


class Cost(NamedTuple):
    """The work and the accuracy of a condition."""

    name: str
    work: float
    """Relative to vanilla."""
    top1: Spread


def passes(values: Mapping[str, Any]) -> float:
    """Passes over an image in one step, from the table of methods; vanilla has 3."""
    own, share = METHODS[values["method"]].passes, float(values.get("twin_share", 1))
    views = 2 if values.get("data.views") == "three" else 1
    attacks = 0 if values.get("attack.direction") == "noise" else int(values.get("attack.steps", 1))
    return (
        own.get(Role.CLEAN, 0) * views + share * own.get(Role.ADV, 0) + share * attacks * own.get(Role.ATTACK, 0)
    )  # fmt: skip


def work_of(condition: Condition) -> float | None:
    """Total passes over images in the whole training; None: unknown."""
    steps = condition.metric("steps") if condition.settings["method"] in METHODS else None
    return passes(condition.settings) * steps.mean * condition.settings["batch_size"] if steps else None


def dominating(costs: Sequence[Cost], one: Cost) -> Cost | None:
    """The most accurate condition that dominates this one; None if there is none."""
    better = [
        other
        for other in costs
        if other.work <= one.work
        and other.top1.mean >= one.top1.mean
        and (other.work, other.top1.mean) != (one.work, one.top1.mean)
    ]
    return max(better, key=lambda other: (other.top1.mean, -other.work), default=None)


def section(evidence: Evidence) -> Section | None:
    """A table and a figure for each batch size with at least three conditions whose work differs, or None."""
    blocks: list[Block] = []
    for group in _groups(evidence):
        costs = _costs(evidence, group)
        if len(costs) >= _FEWEST and len({cost.work for cost in costs}) > 1:
            blocks += _blocks(show("batch_size", group[0].settings["batch_size"]), costs, len(blocks))
    return Section("cost", "Accuracy against work", blocks) if blocks else None


def _groups(evidence: Evidence) -> list[list[Condition]]:
    """Conditions with the same data, network and batch size, regardless of augmentation; largest batch first."""
    groups: dict[object, list[Condition]] = {}
    for condition in evidence.main:
        key = tuple(pair for pair in context(condition) if pair[0] not in ("data.augment", "data.views"))
        groups.setdefault(key, []).append(condition)
    return sorted(groups.values(), key=lambda group: -int(group[0].settings["batch_size"]))


def _costs(evidence: Evidence, group: Sequence[Condition]) -> list[Cost]:
    vanilla = next((work_of(one) for one in group if evidence.is_baseline(one)), None)
    if not vanilla:
        return []
    found = [(name, work_of(one), one.metric(TOP1)) for name, one in zip(labels(group), group, strict=True)]
    known = [Cost(name, work / vanilla, top1) for name, work, top1 in found if work and top1]
    return sorted(known, key=lambda cost: (cost.work, -cost.top1.mean))


def _blocks(batch: str, costs: Sequence[Cost], number: int) -> list[Block]:
    over = [dominating(costs, cost) for cost in costs]
    rows = [
        [cost.name, str(place), f"{cost.work:.2f}", cost.top1.text_n(), f"by {other.name}" if other else "no"]
        for place, (cost, other) in enumerate(zip(costs, over, strict=True), 1)
    ]
    slug = f"cost-{number // 2 + 1}"
    caption = (
        f"Batch {batch}: work of the whole training relative to vanilla, in passes over images (forward 1, backward "
        "2), and test accuracy, mean ± sample standard deviation (n). Dominated: another one is at least as accurate, "
        "by its mean, at no more work."
    )
    head = ["arm", "in the figure", "work", "test accuracy, %", "dominated"]
    points = [
        (row[1], cost.work, cost.top1, other is not None) for row, cost, other in zip(rows, costs, over, strict=True)
    ]
    drawing = frontier_chart(slug, f"Accuracy against work at batch {batch}", points, "work relative to vanilla")
    text = (
        f"Test accuracy against work at batch {batch}: mean and 95 % interval, numbered as in the table. Filled and "
        "joined: the frontier; hollow: dominated."
    )
    return [
        Table(f"table-{slug}", caption, head, rows, frozenset({4})),
        Figure(f"figure-{slug}", text, [drawing]),
    ]
