"""The report of a study as one HTML page, from the files that a sweep wrote. Loads no torch.

results.jsonl ──► compare.py: cells, conditions ──► verdict, tables, figures.py ──► report.html.jinja
metrics of the runs ──► curves, also kept in curves.json, so that a report can be written without the runs
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from conadv.toml_file import read_toml
from conadv.trainer.files import read_text, replace_file

from . import figures, paper
from .compare import LEVEL, ROBUST, TOP1, cells, conditions, main_cells
from .origin import read_origins
from .results import Result, number, parse_json, read_results

CURVES = "curves.json"
_BINS = 60
_MOST_ROWS = 20  # of the opening figure, if another one shows the same runs
CSV = ["cell", "label", "grids", "seed", "rate", TOP1, ROBUST, "train_top1", "gap", "test_loss", "failed", "commit"]


def write_report(folder: Path, out: Path | None = None, with_paper: bool = False) -> dict[str, Any]:
    """Write the report of a study as OUT.html and its cells as OUT.csv, and return what `conadv report` prints.

    Args:
        folder: the folder of the study, of which only results.jsonl is required.
        out: the page; None: report.html in the folder.
        with_paper: add the paper's numbers.
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
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(sheet, everyone[CSV].to_csv(index=False).encode("utf-8", "replace"))
        replace_file(page, html.encode("utf-8", "replace"))
    except OSError as error:
        problem = error.strerror or error
        raise ValueError(f"cannot write {str(page)!r} ({problem}): choose another file with -o") from None
    return {"page": str(page), "csv": str(sheet), "cells": len(results), "done": int(everyone.done.sum())}


def render(folder: Path, results: list[Result], everyone: pd.DataFrame, with_paper: bool = False) -> str:
    """The page as text."""
    text, study = _study(folder)
    chosen = main_cells(everyone)
    table = conditions(chosen)
    known = list(table.index)
    done = chosen[chosen.done & chosen[TOP1].notna()]
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
        paper={name: _html(one) for name, one in paper.tables().items()} if with_paper else {},
        paper_source=paper.SOURCE,
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
        return ["No run has finished with a test accuracy.", "There is nothing to compare yet.", rest]
    best = table[TOP1].idxmax()
    first = f"“{best}” has the highest test accuracy, {_spread(table.loc[best], TOP1)} % (mean ± standard deviation)"
    if table[ROBUST].notna().any():
        strongest = table[ROBUST].idxmax()
        first += f"; “{strongest}” has the highest accuracy under attack, {_spread(table.loc[strongest], ROBUST)} %"
    tested = table[table.p_holm.notna()]
    seeds = f"{table.n.min()} to {table.n.max()}" if table.n.min() < table.n.max() else f"{table.n.max()}"
    last = f"Each mean is over {seeds} seed{'s' * (seeds != '1')}; {rest}"
    if tested.empty:
        why = (
            "no vanilla arm has the same data, model and batch" if table.baseline.isna().all() else "seeds are too few"
        )
        return [f"{first}.", f"No difference from vanilla can be tested: {why}.", last]
    better = tested[(tested.p_holm < LEVEL) & (tested.difference > 0)]
    worse = tested[(tested.p_holm < LEVEL) & (tested.difference < 0)]
    parts = [f"{_list(better)} {_are(better)} more accurate than vanilla"] if len(better) else []
    parts += [f"{_list(worse)} {_are(worse)} less accurate than vanilla"] if len(worse) else []
    left = len(tested) - len(better) - len(worse)
    all_of = f"none of the {left} differences from vanilla can" if left == len(tested) else ""
    parts += [f"{all_of or f'{left} of the {len(tested)} differences cannot'} be told from chance"] if left else []
    second = "; ".join(parts)
    return [f"{first}.", f"{second[0].upper()}{second[1:]} (paired t-test, p < {LEVEL} after Holm's correction).", last]


def accuracy_table(table: pd.DataFrame) -> pd.DataFrame:
    """The main table as texts."""
    shown = pd.DataFrame({"arm": table.index}, index=table.index)
    for metric, name in figures.NAMES.items():
        if table[metric].notna().any():
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
    """Test accuracy by learning rate, if several were tried: means over seeds (their number)."""
    tried = everyone[everyone.done & everyone[TOP1].notna()]
    several = tried.groupby("arm").rate.nunique()
    tried = tried[tried.arm.isin(several[several > 1].index)]
    if tried.empty:
        return pd.DataFrame()
    tried = tried.assign(runs=np.where(tried.tuning, ", tuning", ""))
    grouped = tried.groupby([tried.label + tried.runs, "rate"], sort=False)[TOP1].agg(["mean", "count"])
    texts = [f"{mean:.1f} ({count})" for mean, count in zip(grouped["mean"], grouped["count"], strict=True)]
    wide = pd.Series(texts, grouped.index).unstack(sort=False).sort_index(axis=1).fillna("–")
    wide.columns = [f"{rate:g}" for rate in wide.columns]
    return wide.reset_index(names="arm")


# Curves


def find_curves(folder: Path, chosen: pd.DataFrame) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Mean curves by epoch of each condition ("progress": test accuracy, "loss": training loss), from the runs.

    What an earlier report found is read from curves.json, for runs whose folder is gone.
    """
    found = _saved_curves(folder / CURVES)
    new = False
    for label, own in chosen[chosen.done].groupby("label", sort=False):
        lines = pd.concat([_metrics(folder / "runs" / cell) for cell in own.cell])
        if lines.empty:
            continue
        for kind in ("progress", "loss"):
            if curve := mean_curve(lines, kind):
                found.setdefault(kind, {})[str(label)] = curve
                new = True
    if new:
        with suppress(OSError):  # the folder may be read-only; the report has the curves
            replace_file(folder / CURVES, (json.dumps(found) + "\n").encode())
    return {kind: {label: of[label] for label in chosen.label.unique() if label in of} for kind, of in found.items()}


def mean_curve(lines: pd.DataFrame, name: str) -> list[tuple[float, float]]:
    """The mean of some runs, averaged in bins of equal length."""
    known = lines[["epoch", name]].dropna()
    if known.epoch.nunique() < 3:
        return []
    bins = np.ceil(known.epoch / known.epoch.max() * min(_BINS, known.epoch.nunique()))
    means = known.groupby(bins).mean()
    return [(round(epoch, 2), round(value, 4)) for epoch, value in zip(means.epoch, means[name], strict=True)]


def _metrics(run: Path) -> pd.DataFrame:
    """Epoch, test accuracy and training loss of each line of metrics.jsonl; damaged lines are left out."""
    rows = []
    path = run / "metrics.jsonl"
    for text in read_text(path).splitlines() if path.is_file() else ():
        try:
            line = parse_json(text)
            loss = line.get("clean_loss", line.get("loss"))
            rows.append((number(line.get("epoch")), number(line.get(TOP1)), number(loss)))
        except (ValueError, AttributeError):
            continue
    return pd.DataFrame(rows, columns=["epoch", "progress", "loss"], dtype=float)


def _saved_curves(path: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    try:
        saved = parse_json(read_text(path))
        return {
            kind: {label: [(float(x), float(y)) for x, y in curve] for label, curve in saved.get(kind, {}).items()}
            for kind in ("progress", "loss")
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        raise ValueError(f"{str(path)!r} is damaged: remove it; a report works without it") from None


def _curve_figures(folder: Path, chosen: pd.DataFrame, table: pd.DataFrame) -> list[figures.Picture]:
    names = {"progress": "test accuracy, %", "loss": "training loss"}
    drawn = []
    for kind, of in find_curves(folder, chosen).items():
        ranked = [label for label in table[TOP1].sort_values(ascending=False).index if label in of]
        first = [label for label in table.index if label in of and label == table.baseline[label]][:1]
        kept = [*first, *(label for label in ranked if label not in first)][: figures.MOST_LINES]
        curves = {label: of[label] for label in table.index if label in kept and len(of[label]) > 1}
        if curves:
            fewer = "" if len(curves) == len(of) else " Vanilla, and the arms with the highest final accuracy."
            caption = f"{names[kind].capitalize().rstrip(', %')} by epoch, mean over the seeds.{fewer}"
            drawn.append(figures.lines(curves, names[kind], caption))
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


def _list(table: pd.DataFrame) -> str:
    names = [f"“{label}” ({_signed(row.difference)} points)" for label, row in table.iterrows()]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _are(table: pd.DataFrame) -> str:
    return "is" if len(table) == 1 else "are"
