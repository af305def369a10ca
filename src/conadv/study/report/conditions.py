"""Conditions: what is compared. A condition has the runs of an arm that differ in nothing but the seed.

results ──► conditions ──► the best learning rate of each ──► families, which differ in one setting
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from conadv.study.cells import NUMBERLESS, short
from conadv.study.results import Result, is_tuning

from .spread import Spread, spread

RATE = "optimizer.lr"
_WORDS = {"attack.epsilon": "ε", RATE: "learning rate", "batch_size": "batch", "data.augment": "augmentation"}
Setting = tuple[tuple[str, Any], ...]

# Chosen for each condition alike rather than compared: they may differ where something else is compared.
_TUNED = frozenset({RATE, "schedule.warmup_epochs"})
# Not compared for their own sake: the method is what the arms are about, and the others follow from something else.
_ASIDE = frozenset({*_TUNED, "method", "chunk_size", "max_steps"})
# Compared wherever they vary, also between arms.
_ALWAYS = frozenset({"attack.epsilon", "delay", "batch_size", "epochs", "data.augment"})


@dataclass(frozen=True)
class Condition:
    """Runs that differ in nothing but the seed."""

    arm: str
    settings: Mapping[str, Any]
    """By dotted key, without the seed and without what has no effect."""
    runs: tuple[Result, ...]
    """That have come to their end, one a seed."""
    failed: int = 0
    missing: int = 0

    def figure(self, name: str) -> Spread | None:
        """A figure of the summaries over the seeds."""
        return spread(figure_of(run, name) for run in self.runs)

    def by_seed(self, name: str) -> dict[int, float]:
        figures = {run.values["seed"]: figure_of(run, name) for run in self.runs}
        return {seed: figure for seed, figure in figures.items() if figure is not None}

    def minus(self, other: Condition, name: str) -> Spread | None:
        """The difference of a figure, over the seeds that both have."""
        mine, theirs = self.by_seed(name), other.by_seed(name)
        return spread(mine[seed] - theirs[seed] for seed in mine if seed in theirs)

    def over(self, other: Condition, name: str) -> Spread | None:
        """The ratio of a figure, over the seeds that both have."""
        mine, theirs = self.by_seed(name), other.by_seed(name)
        return spread(mine[seed] / theirs[seed] for seed in mine if theirs.get(seed))


def conditions(results: Iterable[Result]) -> list[Condition]:
    """In the order of the study. Two runs of one seed, which differ in what has no effect, count once."""
    grouped: dict[tuple[str, Setting], list[Result]] = {}
    for result in results:
        grouped.setdefault((result.arm, tuple(effective(result.values).items())), []).append(result)
    return [_condition(arm, dict(settings), several) for (arm, settings), several in grouped.items()]


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that decide a run's numbers, but for its seed."""
    plain = values.get("method") == "vanilla"
    return {
        key: value
        for key, value in values.items()
        if key not in NUMBERLESS
        and key != "seed"
        and not (plain and (key.startswith("attack.") or key == "adv_weight"))
    }


def main_results(results: Sequence[Result]) -> list[Result]:
    """What is compared: all but the tuning, or the tuning where a study has nothing else yet."""
    rest = [result for result in results if not is_tuning(result)]
    return rest if any(result.summary for result in rest) else list(results)


def best_rates(several: Iterable[Condition]) -> list[Condition]:
    """Of conditions that differ in the learning rate alone, the one with the highest mean test accuracy."""
    best: dict[tuple[str, Setting], Condition] = {}
    for condition in several:
        key = (condition.arm, _without(condition.settings, {RATE}))
        if key not in best or _rank(condition) > _rank(best[key]):
            best[key] = condition
    return list(best.values())


def families(several: Sequence[Condition], key: str, also: Iterable[str] = ()) -> list[list[Condition]]:
    """Conditions that agree in all but `key` (and what is tuned, and `also`), where it has more than one value."""
    found: dict[Setting, dict[Any, Condition]] = {}
    for condition in several:
        if key in condition.settings and condition.runs:
            rest = _without(_as_one_method(condition.settings), {key, *_TUNED, *also})
            found.setdefault(rest, {}).setdefault(condition.settings[key], condition)
    return [
        sorted(family.values(), key=lambda condition: _order(condition.settings[key]))
        for family in found.values()
        if len(family) > 1
    ]


def compared_settings(several: Sequence[Condition]) -> dict[str, list[list[Condition]]]:
    """The families by each setting that a study compares: what varies within an arm, and what the paper varies."""
    keys = dict.fromkeys(key for condition in several for key in condition.settings if key not in _ASIDE)
    chosen = [key for key in keys if key in _ALWAYS or key in varying_within_arms(several)]
    found = {key: families(several, key, also=("chunk_size",)) for key in chosen}
    return {key: rows for key, rows in found.items() if rows}


def representatives(several: Sequence[Condition]) -> list[Condition]:
    """The first condition of each arm, and those that no family of a compared setting has."""
    elsewhere = {id(one) for rows in compared_settings(several).values() for row in rows for one in row}
    first = {one.arm: id(one) for one in reversed(several)}
    return [one for one in several if first[one.arm] == id(one) or id(one) not in elsewhere]


def varying_within_arms(several: Sequence[Condition]) -> list[str]:
    """The settings, but for the learning rate, that an arm has several values of."""
    keys = dict.fromkeys(key for condition in several for key in condition.settings if key != RATE)
    return [key for key in keys if any(len(_values(several, arm, key)) > 1 for arm in _arms(several))]


def varying(several: Sequence[Condition], key: str) -> bool:
    return len({condition.settings.get(key) for condition in several}) > 1


def baseline(several: Sequence[Condition], condition: Condition) -> Condition | None:
    """The first vanilla condition on the same data, model and batch: what the condition is compared with."""
    return next(
        (
            other
            for other in several
            if other.settings.get("method") == "vanilla" and _context(other) == _context(condition) and other.runs
        ),
        None,
    )


def labels(several: Sequence[Condition]) -> list[str]:
    """A name for each condition that tells it from the others, with no more settings than its arm needs."""
    keys = [key for key in varying_within_arms(several) if key != "chunk_size"]
    return [", ".join([one.arm, *_details(one, several, keys)]) for one in several]


def _details(condition: Condition, several: Sequence[Condition], keys: Iterable[str]) -> list[str]:
    mine = [key for key in keys if key in condition.settings and len(_values(several, condition.arm, key)) > 1]
    return [f"{word(key)} {show(key, condition.settings[key])}" for key in mine]


def word(key: str) -> str:
    """What people call a setting."""
    return _WORDS.get(key, short(key).replace("_", " "))


def show(key: str, value: Any) -> str:
    """A value as people write it: a radius in 255ths, numbers without needless digits."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        level = value * 255
        if key.startswith("attack.") and key.endswith(("epsilon", "step_size")):
            near = Fraction(level).limit_denominator(4)
            return f"{float(near):g}/255" if abs(near - level) < 1e-6 and value else f"{value:g}"
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def figure_of(run: Result, name: str) -> float | None:
    """A figure of a run's summary; None where it is missing or was not finite."""
    value = (run.summary or {}).get(name)
    return float(value) if isinstance(value, int | float) else None


def _condition(arm: str, settings: dict[str, Any], results: Sequence[Result]) -> Condition:
    seeds: dict[int, Result] = {}
    for result in results:
        if result.summary is not None:
            seeds.setdefault(result.values["seed"], result)
    rest = [result for result in results if result.summary is None]
    failed = sum(result.error is not None for result in rest)
    return Condition(arm, settings, tuple(seeds[seed] for seed in sorted(seeds)), failed, len(rest) - failed)


def _without(settings: Mapping[str, Any], keys: Iterable[str]) -> Setting:
    left_out = set(keys)
    return tuple((key, value) for key, value in settings.items() if key not in left_out)


def _as_one_method(settings: Mapping[str, Any]) -> dict[str, Any]:
    """disadv is conadv with delay 0."""
    return {**settings, "method": "conadv" if settings["method"] == "disadv" else settings["method"]}


def _rank(condition: Condition) -> tuple[bool, float]:
    top1 = condition.figure("test_top1")
    return top1 is not None, top1.mean if top1 else 0.0


def _context(condition: Condition) -> Setting:
    keys = ("batch_size", "model", "width", "precision")
    return tuple((key, value) for key, value in condition.settings.items() if key in keys or key.startswith("data."))


def _values(several: Iterable[Condition], arm: str, key: str) -> set[Any]:
    return {one.settings.get(key) for one in several if one.arm == arm}


def _arms(several: Iterable[Condition]) -> list[str]:
    return list(dict.fromkeys(condition.arm for condition in several))


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts as they are, "none" first."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, "" if value in (None, "none") else str(value)
