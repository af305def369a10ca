"""What a report compares: conditions (runs of an arm that differ only in the seed) and their means.

results ──► conditions ──► the best learning rate of each ──► families, which differ in one setting
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, stdev
from typing import Any

from conadv.core.catalog import METHODS
from conadv.study.results import Result, is_tuning
from conadv.study.study_file import NUMBERLESS, short

RATE, TOP1 = "optimizer.lr", "test_top1"
Setting = tuple[tuple[str, Any], ...]

_WORDS = {"attack.epsilon": "ε", RATE: "learning rate", "batch_size": "batch", "data.augment": "augmentation"}
# Tuned for each condition, so they may differ between conditions that are compared.
TUNED = frozenset({RATE, "schedule.warmup_epochs"})
# These get no section of their own: arms compare the methods, and the others depend on other settings.
_ASIDE = frozenset({*TUNED, "method", "chunk_size", "max_steps"})
# These get a section if they vary within or between arms; other settings only if they vary within an arm.
_ALWAYS = frozenset({"attack.epsilon", "delay", "batch_size", "epochs", "data.augment"})
# Settings and tables that only some methods take; with the others they have no effect.
_OPTIONS = frozenset({"attack", "adv_weight", "twin_share", "twin_branch", "rho"})
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, that of the normal distribution.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of n numbers; None for a single number."""

    mean: float
    deviation: float | None
    n: int

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean (Student's t); None for a single number."""
        if self.deviation is None:
            return None
        return (_T95[self.n - 2] if self.n - 2 < len(_T95) else 1.96) * self.deviation / math.sqrt(self.n)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean; None for a single number."""
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)

    @property
    def p_value(self) -> float | None:
        """Two-sided p-value of a t-test that the mean is 0; None for a single number."""
        if self.deviation is None:
            return None
        if self.deviation == 0:
            return float(self.mean == 0)
        return t_test(self.mean / self.deviation * math.sqrt(self.n), self.n - 1)

    def text(self, digits: int = 1, signed: bool = False) -> str:
        """Such as 37.1 ± 0.4."""
        mean = number(self.mean, digits, signed)
        return mean if self.deviation is None else f"{mean} ± {number(self.deviation, digits)}"

    def text_n(self, digits: int = 1, signed: bool = False) -> str:
        """Such as 37.1 ± 0.4 (3)."""
        return f"{self.text(digits, signed)} ({self.n})"

    def interval_text(self, digits: int = 1) -> str:
        if self.interval is None:
            return "–"
        low, high = (number(end, digits, signed=True) for end in self.interval)
        return f"{low} to {high}"


def t_test(t: float, freedom: int) -> float:
    """The two-sided p-value of a t statistic with this many degrees of freedom."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):  # the finite series for whole degrees of freedom
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    inside = 2 / math.pi * (angle + (total if freedom > 1 else 0.0)) if odd else total
    return min(max(1 - inside, 0.0), 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for multiple comparisons by Holm's method (family-wise error rate)."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = least
    return corrected


def spread(numbers: Iterable[float | None]) -> Spread | None:
    """Mean and deviation of the numbers that are not None; None if there are none."""
    known = [one for one in numbers if one is not None]
    return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known)) if known else None


def number(value: float, digits: int, signed: bool = False) -> str:
    """Format a number with a typographic minus sign, and without negative zero."""
    rounded = round(value, digits) + 0.0
    return f"{rounded:{'+' if signed and rounded else ''}.{digits}f}".replace("-", "−")


@dataclass(frozen=True, eq=False)
class Condition:
    """Runs that differ only in the seed."""

    arm: str
    settings: Mapping[str, Any]
    """By dotted key, without the seed and settings that have no effect."""
    runs: tuple[Result, ...]
    """Finished runs, one per seed."""
    failed: int = 0
    missing: int = 0

    def metric(self, name: str) -> Spread | None:
        """A metric over the seeds."""
        return spread(run.metric(name) for run in self.runs)

    def by_seed(self, name: str) -> dict[int, float]:
        """A metric by seed."""
        return {run.values["seed"]: value for run in self.runs if (value := run.metric(name)) is not None}

    def minus(self, other: Condition, name: str) -> Spread | None:
        """The paired difference of a metric, over the seeds that both have."""
        mine, theirs = self.by_seed(name), other.by_seed(name)
        return spread(mine[seed] - theirs[seed] for seed in mine if seed in theirs)

    def over(self, other: Condition, name: str) -> Spread | None:
        """The ratio of a metric, over the seeds that both have."""
        mine, theirs = self.by_seed(name), other.by_seed(name)
        return spread(mine[seed] / theirs[seed] for seed in mine if theirs.get(seed))


def conditions(results: Iterable[Result]) -> list[Condition]:
    """Group results, in the order of the study. Runs of one seed that differ in settings without effect count once."""
    grouped: dict[tuple[str, Setting], list[Result]] = {}
    for result in results:
        grouped.setdefault((result.arm, tuple(effective(result.values).items())), []).append(result)
    found = []
    for (arm, settings), several in grouped.items():
        seeds = {one.values["seed"]: one for one in reversed(several) if one.summary is not None}
        rest = [one for one in several if one.summary is None]
        failed = sum(one.error is not None for one in rest)
        runs = tuple(seeds[seed] for seed in sorted(seeds))
        found.append(Condition(arm, dict(settings), runs, failed, len(rest) - failed))
    return found


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine a run's results, except for its seed."""
    method = METHODS.get(str(values.get("method")))
    unused = _OPTIONS - set(method.options) if method else frozenset[str]()
    without = {*NUMBERLESS, "seed"}
    return {key: value for key, value in values.items() if key not in without and key.partition(".")[0] not in unused}


def main_conditions(results: Sequence[Result]) -> list[Condition]:
    """The finished conditions, each at its best learning rate. Tuning runs count only if there are no others yet."""
    rest = [result for result in results if not is_tuning(result)]
    best: dict[tuple[str, Setting], tuple[float, Condition]] = {}
    for condition in conditions(rest if any(result.summary for result in rest) else results):
        key, top1 = (condition.arm, _without(condition.settings, {RATE})), condition.metric(TOP1)
        mean = top1.mean if top1 else -math.inf
        if key not in best or mean > best[key][0]:
            best[key] = mean, condition
    return [condition for _, condition in best.values() if condition.runs]


def compared_settings(several: Sequence[Condition]) -> dict[str, list[list[Condition]]]:
    """The settings to compare, each with its families: conditions that differ only in this setting."""
    keys = dict.fromkeys(key for condition in several for key in condition.settings if key not in _ASIDE)
    chosen = [key for key in keys if key in _ALWAYS or key in varying_within_arms(several)]
    found = {key: _families(several, key) for key in chosen}
    return {key: rows for key, rows in found.items() if rows}


def _families(several: Sequence[Condition], key: str) -> list[list[Condition]]:
    """Groups of two or more conditions that differ only in `key`, and in tuned and dependent settings."""
    found: dict[Setting, dict[Any, list[Condition]]] = {}
    for condition in several:
        settings = dict(condition.settings)
        if settings["method"] == "disadv":
            settings["method"] = "conadv"  # disadv is conadv with delay 0
        if key in settings and condition.runs:
            rest = _without(settings, {key, "chunk_size", *TUNED})
            found.setdefault(rest, {}).setdefault(settings[key], []).append(condition)
    families = [_one_each(family) for family in found.values() if len(family) > 1]
    return [sorted(family, key=lambda condition: _order(condition.settings[key])) for family in families]


def _one_each(family: Mapping[Any, Sequence[Condition]]) -> list[Condition]:
    """One condition per value. Of several that differ in tuned settings: that of the arm with the most values, in a tie
    that with the most frequent learning rate.
    """
    arms = Counter(one.arm for several in family.values() for one in several)
    rates = Counter(one.settings[RATE] for several in family.values() for one in several)
    return [max(several, key=lambda one: (arms[one.arm], rates[one.settings[RATE]])) for several in family.values()]


def representatives(several: Sequence[Condition]) -> list[Condition]:
    """The first condition of each arm, those that are in no family, and the baselines of both."""
    elsewhere = {one for rows in compared_settings(several).values() for row in rows for one in row}
    first = {one.arm: one for one in reversed(several)}
    chosen = [one for one in several if first[one.arm] is one or one not in elsewhere]
    compared = {baseline(several, one) for one in chosen}
    return [one for one in several if one in chosen or one in compared]


def varying_within_arms(several: Sequence[Condition]) -> list[str]:
    """The settings, except for the learning rate, that have several values within an arm."""
    keys = dict.fromkeys(key for condition in several for key in condition.settings if key != RATE)
    arms = {condition.arm for condition in several}
    return [key for key in keys if any(len(_values(several, arm, key)) > 1 for arm in arms)]


def baseline(several: Sequence[Condition], condition: Condition) -> Condition | None:
    """The vanilla condition to compare with: the first with the same data, model and batch size."""
    alike = (other for other in several if other.settings["method"] == "vanilla" and other.runs)
    return next((other for other in alike if context(other) == context(condition)), None)


def labels(several: Sequence[Condition]) -> list[str]:
    """A unique name for each condition: its arm, and the settings that vary within the arm."""
    keys = [key for key in varying_within_arms(several) if key != "chunk_size"]
    return [
        described(one, [key for key in keys if key in one.settings and len(_values(several, one.arm, key)) > 1])
        for one in several
    ]


def described(condition: Condition, keys: Iterable[str]) -> str:
    """The arm and some settings."""
    return ", ".join([condition.arm, *(f"{word(key)} {show(key, condition.settings[key])}" for key in keys)])


def word(key: str) -> str:
    """The common name of a setting."""
    return _WORDS.get(key, short(key).replace("_", " "))


def show(key: str, value: Any) -> str:
    """A value for readers: epsilon in 255ths, other numbers with six significant digits at most."""
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


def _without(settings: Mapping[str, Any], keys: set[str]) -> Setting:
    return tuple((key, value) for key, value in settings.items() if key not in keys)


def context(condition: Condition) -> Setting:
    """The settings that a condition shares with its baseline."""
    keys = ("batch_size", "model", "width", "precision")
    return tuple((key, value) for key, value in condition.settings.items() if key in keys or key.startswith("data."))


def _values(several: Iterable[Condition], arm: str, key: str) -> set[Any]:
    return {one.settings.get(key) for one in several if one.arm == arm}


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts, "none" first."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, "" if value in (None, "none") else str(value)
