"""What a report compares: conditions (runs of an arm that differ only in the seed), each with vanilla, seed by seed.

results ──► cells (a row per run) ──► the best learning rate of each condition ──► conditions (a row each)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from conadv.catalog import METHODS

from .results import Cell, number
from .study_file import NUMBERLESS, short

RATE, TOP1, HELD_OUT, ROBUST = "optimizer.lr", "test_top1", "held_out_top1", "robust_top1"
ACCURACY = "accuracy"
"""What is compared: test accuracy, or that on held-out images if a tuning run has some."""
METRICS = (ACCURACY, TOP1, ROBUST, "train_top1", "gap", "test_loss")
LEVEL = 0.05
"""Significance level, after the correction for several comparisons."""

_WORDS = {"attack.epsilon": "ε", RATE: "learning rate", "batch_size": "batch", "data.augment": "augmentation"}
# Tuned for each condition, or a consequence of another setting: they tell no two conditions of an arm apart.
_ASIDE = {"seed", RATE, "schedule.warmup_epochs", "chunk_size", "max_steps"}
# What only methods with twins use.
_OF_TWINS = ("attack", "adv_weight", "adv_until", "scale_norms", "twin_share", "twin_branch", "shuffle_twins")
# What a condition shares with the vanilla that it is compared with, besides everything about the data but these.
_CONTEXT = ("model", "width", "precision")
_OF_IMAGES = ("data.copies", "data.views")


def cells(results: Sequence[Cell]) -> pd.DataFrame:
    """One row per cell: its arm, its condition (`label`, unique among arms and settings), its seed and its metrics.

    If a single setting varies within the arm, `axis` is its key and `place` the value of this cell.
    """
    rows = []
    for result in results:
        settings = _effective(result.values)
        data = {key: value for key, value in settings.items() if key.startswith("data.") and key not in _OF_IMAGES}
        context = {**data, **{key: settings.get(key) for key in _CONTEXT}}
        context["images"] = settings["batch_size"] / settings.get("data.copies", 1)  # different ones in a batch
        known = {
            "cell": result.cell,
            "arm": result.arm,
            "grids": ", ".join(result.grids),
            "tuning": all(name.lower().startswith("tun") for name in result.grids),
            "method": result.values["method"],
            "seed": result.values["seed"],
            "rate": np.nan_to_num(number(result.values.get(RATE))),
            "settings": json.dumps({key: value for key, value in settings.items() if key not in _ASIDE}),
            "context": json.dumps(context),
            "done": result.summary is not None,
            "failed": result.error is not None,
            "commit": result.commit,
        }
        summary = result.summary or {}
        held_out = known["tuning"] and HELD_OUT in summary
        known |= {"held_out": held_out, ACCURACY: number(summary.get(HELD_OUT if held_out else TOP1))}
        rows.append({**known, **{name: number(summary.get(name)) for name in METRICS[1:]}})
    table = pd.DataFrame(rows)
    return table.join(_labels(table))


def main_cells(table: pd.DataFrame) -> pd.DataFrame:
    """The cells to compare: no tuning runs, if there are others, and of each condition the best learning rate.

    Of a seed that ran more than once, with settings that make no difference, the first run counts.
    """
    rest = table[~table.tuning]
    table = rest if rest.done.any() else table
    means = table.groupby(["label", "rate"], sort=False)[ACCURACY].mean()
    best = {label: means[label].fillna(-np.inf).idxmax() for label in table.label.unique()}
    chosen = table[table.rate == table.label.map(best)]
    return chosen.sort_values("done", ascending=False, kind="stable").drop_duplicates(["label", "seed"]).sort_index()


def conditions(chosen: pd.DataFrame) -> pd.DataFrame:
    """One row per condition: means, standard deviations, and the paired difference from its vanilla.

    Columns: rate, n, failed, missing, mean and std of each metric
    (`accuracy`, `accuracy_std`, ...), baseline, difference, difference_low, difference_high, pairs (the seeds of both),
    p and p_holm.
    """
    done = chosen[chosen.done & chosen[ACCURACY].notna()]
    arms = {arm: place for place, arm in enumerate(done.arm.unique())}
    done = done.sort_values("arm", key=lambda names: names.map(arms), kind="stable")  # the rows of an arm together
    rows = {}
    for label, own in done.groupby("label", sort=False):
        everyone, metrics = chosen[chosen.label == label], own[list(METRICS)]
        failed = int(everyone.failed.sum())
        # The vanilla condition with the same data, model and batch.
        alike = done[(done.method == "vanilla") & (done.context == own.context.iloc[0])].label
        base = alike.iloc[0] if len(alike) else None
        rows[label] = {
            "rate": own.rate.iloc[0],
            "n": len(own),
            "failed": failed,
            "missing": len(everyone) - len(own) - failed,
            "held_out": own.held_out.any(),
            **metrics.mean(),
            **metrics.std().add_suffix("_std"),
            "baseline": base,
            **(paired(own, done[done.label == base]) if base not in (None, label) else {}),
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    tested = ["difference", "difference_low", "difference_high", "pairs", "p"]
    table = table.reindex(columns=table.columns.union(tested, sort=False))
    return table.assign(p_holm=holm(table.p))


def interval(values: pd.Series) -> tuple[float, float]:
    """The 95 % confidence interval of a mean by Student's t; of a single number, none."""
    if len(values) < 2:
        return np.nan, np.nan
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(values.mean() - half), float(values.mean() + half)


def paired(own: pd.DataFrame, base: pd.DataFrame) -> dict[str, float]:
    """The difference of accuracy over the seeds that both have, its 95 % interval and p-value (paired t-test)."""
    both = pd.concat(
        {"own": own.set_index("seed")[ACCURACY], "base": base.set_index("seed")[ACCURACY]}, axis=1
    ).dropna()
    found: dict[str, float] = {"pairs": len(both)}
    if len(both):
        found["difference"] = float((both.own - both.base).mean())
    if len(both) > 1:
        with warnings.catch_warnings():  # equal differences have no spread
            warnings.simplefilter("ignore", RuntimeWarning)
            test = stats.ttest_rel(both.own, both.base)
            low, high = test.confidence_interval(0.95)
        found |= {"difference_low": float(low), "difference_high": float(high), "p": float(test.pvalue)}
    return found


def holm(p_values: pd.Series) -> pd.Series:
    """P-values corrected for several comparisons by Holm's method; those that are not known stay so."""
    known = p_values.dropna().sort_values()
    factors = np.arange(len(known), 0, -1)
    corrected = pd.Series(np.maximum.accumulate(known * factors), known.index).clip(upper=1.0)
    return corrected.reindex(p_values.index)


def word(key: str) -> str:
    """The common name of a setting."""
    return _WORDS.get(key, short(key).replace("_", " "))


def shown(key: str, value: Any) -> str:
    """A setting for readers: epsilon in 255ths."""
    if key == "attack.epsilon" and isinstance(value, float):
        return f"{255 * value:.4g}/255"
    return f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that determine a run's results. Methods without twins have no use for an attack."""
    unused = _OF_TWINS if METHODS[values["method"]].maker is None else ()
    return {k: v for k, v in values.items() if k not in NUMBERLESS and k.partition(".")[0] not in unused}


def _labels(table: pd.DataFrame) -> pd.DataFrame:
    """Columns label, axis and place: the arm of each cell, and the settings that vary within it, tuning runs aside."""
    varied = {}
    for (arm, tuning), own in table.groupby(["arm", "tuning"]):
        several = [json.loads(text) for text in own.settings.unique()]
        keys = dict.fromkeys(key for settings in several for key in settings)
        varied[arm, tuning] = [key for key in keys if len({json.dumps(one.get(key)) for one in several}) > 1]
    owners: dict[str, tuple[str, str]] = {}
    rows = []
    for arm, tuning, text in zip(table.arm, table.tuning, table.settings, strict=True):
        settings, apart = json.loads(text), varied[arm, tuning]
        label = ", ".join([arm, *(f"{word(key)} {shown(key, settings.get(key))}" for key in apart)])
        while owners.setdefault(label, (arm, text)) != (arm, text) and not tuning:
            label += "'"  # an arm whose name is that of another arm with its settings
        axis = apart[0] if len(apart) == 1 else ""
        rows.append((label, axis, number(settings.get(axis))))
    return pd.DataFrame(rows, table.index, ["label", "axis", "place"])
