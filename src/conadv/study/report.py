"""The report of a study as one HTML page, from the files that a sweep wrote. Loads no torch.

results.jsonl ──► compare.py: cells, conditions ──► verdict, tables, figures.py ──► report.html.jinja
metrics of the runs, as far as they are there ──► curves
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from conadv.atomic import write_output
from conadv.config import read_toml
from conadv.trainer.metrics import read_metrics

from . import figures
from .compare import ACCURACY, LEVEL, ROBUST, TOP1, cells, conditions, main_cells
from .results import Cell, number, read_origins, read_results

_CURVE = ["label", "epoch", TOP1, "loss"]
_BINS = 60
_MOST_ROWS = 20  # of the opening figure, if another one shows the same runs
CSV = ["cell", "label", "grids", "seed", "rate", TOP1, ROBUST, "train_top1", "gap", "test_loss", "failed", "commit"]


def write_report(folder: Path, out: Path | None = None, with_paper: bool = False) -> dict[str, Any]:
    """Write the report of a study as OUT.html and its cells as OUT.csv, and return what `conadv report` prints.

    Of the study's folder, only results.jsonl is required. By default, the page is report.html in it.
    """
    page = out or folder / "report.html"
    if page.suffix != ".html":
        raise ValueError(f"a report is written as HTML, not {str(page)!r}: choose a name that ends in .html")
    sheet = page.with_suffix(".csv")
    for path in (page, sheet):
        if path.is_dir():
            raise ValueError(f"cannot write {str(path)!r}, which is a folder: choose another file with -o")
    results = read_results(folder)
    if not results:
        raise ValueError(f"{str(folder)!r} has no cells: run conadv sweep first")
    everyone = cells(results)
    html = render(folder, results, everyone, with_paper)
    write_output(sheet, everyone[CSV].to_csv(index=False).encode("utf-8", "replace"))
    write_output(page, html.encode("utf-8", "replace"))
    return {"page": str(page), "csv": str(sheet), "cells": len(results), "done": int(everyone.done.sum())}


def render(folder: Path, results: list[Cell], everyone: pd.DataFrame, with_paper: bool = False) -> str:
    """The page as text."""
    text, study = _study(folder)
    chosen = main_cells(everyone)
    table = conditions(chosen)
    known = list(table.index)
    done = chosen[chosen.done & chosen[ACCURACY].notna()]
    environment = Environment(
        loader=PackageLoader("conadv.study", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    every, by_setting = (figures.dots(done, known), figures.by_setting(done)) if known else (None, [])
    opening = by_setting.pop(0) if len(known) > _MOST_ROWS and by_setting else every
    failures = [(result.name, result.error) for result in results if result.error is not None]
    return environment.get_template("report.html.jinja").render(
        title=str(study.get("title") or folder.resolve().name),
        about=_paragraphs(study.get("about")),
        conclusions=_paragraphs(study.get("conclusions")),
        verdict=verdict(everyone, table),
        opening=opening,
        table=_html(accuracy_table(table)) if known else "",
        comparisons=int(table.p.notna().sum()) if known else 0,
        further=[picture for picture in (every, *by_setting) if picture is not None and picture is not opening],
        curves=_curve_figures(folder, chosen, table) if known else [],
        rates=_html(rate_table(everyone)),
        paper=with_paper,
        failures=failures,
        commits=sorted(everyone.commit.dropna().unique()),
        origin=json.dumps(read_origins(folder), indent=1),
        study=text,
    )


def verdict(everyone: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Three sentences: which condition is best, which differ from vanilla, and what this rests on."""
    finished, failed = int(everyone.done.sum()), int(everyone.failed.sum())
    rest = f"{finished} of {len(everyone)} runs have finished" + (f", and {failed} failed." if failed else ".")
    if table.empty:
        return ["No run has finished with an accuracy.", "There is nothing to compare yet.", rest]
    best = table.index[np.isclose(table[ACCURACY], table[ACCURACY].max())]
    kind = figures.names(table)[ACCURACY].removesuffix(", %")
    who = f"“{best[0]}” has" if len(best) == 1 else " and ".join(f"“{name}”" for name in best) + " share"
    first = f"{who} the highest {kind}, {_spread(table.loc[best[0]], ACCURACY)} % (mean ± standard deviation)"
    if table[ROBUST].notna().any():
        strongest = table[ROBUST].idxmax()
        first += f"; “{strongest}” has the highest accuracy under attack, {_spread(table.loc[strongest], ROBUST)} %"
    tested = table[table.p_holm.notna()]
    seeds = f"{table.n.min()} to {table.n.max()}" if table.n.min() < table.n.max() else f"{table.n.max()}"
    last = f"Each mean is over {seeds} seed{'s' * (seeds != '1')}; {rest}"
    if tested.empty:
        alone = table.baseline.isna().all()
        why = "no vanilla arm has the same data, model and batch" if alone else "seeds are too few"
        return [f"{first}.", f"No difference from vanilla can be tested: {why}.", last]
    sure = tested[tested.p_holm < LEVEL]
    kinds = {"More accurate than vanilla": sure[sure.difference > 0], "less accurate": sure[sure.difference < 0]}
    parts = [f"{kind}: {_names(rows)}" for kind, rows in kinds.items() if len(rows)]
    left = len(tested) - len(sure)
    parts += [f"{left} of {len(tested)} differences from vanilla are not significant"] if left and len(sure) else []
    parts = parts or ["no difference from vanilla is significant"]
    second = "; ".join(parts)
    return [f"{first}.", f"{second[0].upper()}{second[1:]} (paired t-test, p < {LEVEL} after Holm's correction).", last]


def accuracy_table(table: pd.DataFrame) -> pd.DataFrame:
    """The main table as texts."""
    shown = pd.DataFrame({"arm": table.index}, index=table.index)
    for metric, name in figures.names(table).items():
        shown[name] = [_spread(row, metric) for _, row in table.iterrows()]
    if table.baseline.notna().any():
        shown["minus vanilla, points"] = [
            "baseline" if row.baseline == label else _signed(row.difference) for label, row in table.iterrows()
        ]
        ends = zip(table.difference_low, table.difference_high, strict=True)
        shown["95 % interval"] = ["–" if np.isnan(low) else f"{_signed(low)} to {_signed(high)}" for low, high in ends]
        shown["p, corrected"] = ["–" if np.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.2g}" for p in table.p_holm]
    counts = zip(table.n, table.failed, table.missing, strict=True)
    shown["seeds"] = [
        f"{n}" + (f" ({failed} failed)" if failed else "") + (f" ({missing} to do)" if missing else "")
        for n, failed, missing in counts
    ]
    if table.rate.nunique() > 1:
        shown["learning rate"] = [f"{rate:g}" for rate in table.rate]
    return shown


def rate_table(everyone: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy by learning rate, if several were tried, of tuning runs if there are any; and the best rate."""
    tried = everyone[everyone.tuning] if everyone.tuning.any() else everyone
    wide = tried.pivot_table(ACCURACY, "label", "rate", sort=False).sort_index(axis=1)
    wide = wide[wide.notna().sum(axis=1) > 1]
    shown = wide.astype(object).map(lambda mean: "–" if np.isnan(mean) else f"{mean:.1f}")
    shown = shown.rename(columns=lambda rate: f"{rate:g}")
    tried = [(row.idxmax(), row.dropna().index) for _, row in wide.iterrows()]
    shown["best"] = [f"{best:g}" + ", at the edge" * (best in (rates.min(), rates.max())) for best, rates in tried]
    return shown.reset_index(names="arm")


# Curves


def find_curves(folder: Path, chosen: pd.DataFrame) -> pd.DataFrame:
    """Columns label, epoch, test_top1 and loss: means over the runs of each condition."""
    found = [pd.DataFrame(columns=_CURVE, dtype=float)]
    for label, own in chosen[chosen.done].groupby("label", sort=False):
        runs = zip(own.cell, own[TOP1], strict=True)
        lines = pd.concat([_metrics(folder / "runs" / cell, top1) for cell, top1 in runs])
        epochs = lines.epoch.nunique()
        if epochs > 2:  # the mean over the runs, in bins of equal length
            bins = np.ceil(lines.epoch / lines.epoch.max() * min(_BINS, epochs))
            found.append(lines.groupby(bins).mean().assign(label=label)[_CURVE])
    return pd.concat(found[1:] or found)


def _metrics(run: Path, final: float) -> pd.DataFrame:
    """Epoch, test accuracy and training loss of each step.

    The final accuracy, which only the summary has, belongs to the last step, if accuracy was measured before.
    """
    rows = [
        [number(line.get("epoch")), number(line.get(TOP1)), number(line.get("clean_loss", line.get("loss")))]
        for line in read_metrics(run / "metrics.jsonl")
    ]
    lines = pd.DataFrame(rows, columns=_CURVE[1:], dtype=float)
    if lines[TOP1].notna().any():
        lines.loc[len(lines) - 1, TOP1] = final
    return lines


def _curve_figures(folder: Path, chosen: pd.DataFrame, table: pd.DataFrame) -> list[figures.Plot]:
    """Test accuracy and loss by epoch: of vanilla, and of the arms with the highest accuracy."""
    curves = find_curves(folder, chosen)
    ranked = table[ACCURACY].sort_values(ascending=False).index
    vanilla = [label for label in table.index if label == table.baseline[label]][:1]
    kept = [label for label in [*vanilla, *ranked.drop(vanilla)] if label in set(curves.label)][: figures.MOST_LINES]
    fewer = " Vanilla, and the arms with the highest final accuracy." if len(kept) < curves.label.nunique() else ""
    drawn = []
    for column, name in ((TOP1, "test accuracy, %"), ("loss", "training loss")):
        known = curves[curves.label.isin(kept) & curves[column].notna()]
        if len(known) > 2:
            caption = f"{name.removesuffix(', %').capitalize()} by epoch, mean over the seeds.{fewer}"
            in_order = [label for label in table.index if label in set(known.label)]
            drawn.append(figures.lines(known, in_order, column, name, caption))
    return drawn


# Small things


def _study(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """The study file, which a report can do without."""
    path = folder / "study.toml"
    try:
        return read_toml(path)
    except FileNotFoundError:
        return "", {}
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged ({error}): remove it; a report works without it") from None


def _paragraphs(text: object) -> list[str]:
    """Paragraphs, which empty lines separate."""
    return [" ".join(part.split()) for part in str(text or "").replace("\r\n", "\n").split("\n\n") if part.strip()]


def _html(table: pd.DataFrame) -> str:
    return "" if table.empty else str(table.to_html(index=False, border=0, escape=True, justify="unset"))


def _spread(row: pd.Series, metric: str) -> str:
    mean, deviation = row[metric], row[f"{metric}_std"]
    return "–" if np.isnan(mean) else f"{mean:.1f}" if np.isnan(deviation) else f"{mean:.1f} ± {deviation:.1f}"


def _signed(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def _names(table: pd.DataFrame) -> str:
    return ", ".join(f"“{label}” ({_signed(row.difference)} points)" for label, row in table.iterrows())
