"""The tables of the batch study, and its figure: accuracy against the batch, and all arms at the largest one.

python studies/batch/analyse.py [RESULTS.jsonl] [--figure FILE.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from conadv.study.compare import interval

HERE = Path(__file__).parent
MARGIN = 0.5  # points, written down before the first result
CLOSE = 0.3  # points: of rates this close to the best, the smallest is taken
LARGEST = 500
TESTED = "ConAdv"  # the only arm that is tested: at the largest batch
BLUE, GREY, INK = "#0072b2", "#7a828c", "#1b1e23"


def read(path: Path) -> pd.DataFrame:
    """One row per finished cell: whether it tunes a rate, arm, batch, rate, seed, accuracy and training accuracy.

    The batch counts different images: those of a second crop are in it twice.
    """
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        values, summary = cell["values"], cell["summary"]
        if summary:
            tuning = cell["grids"][0].startswith("tuning")
            row = {"tuning": tuning, "arm": cell["arm"], "batch": values["batch_size"] // values["data.copies"]}
            row |= {"rate": values["optimizer.lr"], "seed": values["seed"], "train": summary["train_top1"]}
            rows.append({**row, "accuracy": summary["held_out_top1" if tuning else "test_top1"]})
    return pd.DataFrame(rows)


def tuning_table(cells: pd.DataFrame) -> str:
    """The tuning of the rates as Markdown: held-out accuracy at each, and the rate that the rule takes."""
    lines = ["| arm | batch | rate: held-out accuracy, % | taken | its training images, % |", "|---|--:|---|--:|--:|"]
    for (arm, batch), own in cells[cells.tuning].groupby(["arm", "batch"], sort=False):
        rates = ", ".join(f"{rate:g}: {accuracy:.1f}" for rate, accuracy in zip(own.rate, own.accuracy, strict=True))
        taken = own[own.accuracy > own.accuracy.max() - CLOSE].sort_values("rate").iloc[0]
        lines.append(f"| {arm} | {batch} | {rates} | {taken.rate:g} | {taken.train:.1f} |")
    return "\n".join(lines) + "\n"


def gains(cells: pd.DataFrame) -> pd.DataFrame:
    """The final cells without vanilla, each with its accuracy minus that of vanilla with the same batch and seed."""
    final = cells[~cells.tuning]
    base = final[final.arm == "vanilla"].set_index(["batch", "seed"]).accuracy.rename("base")
    rest = final[final.arm != "vanilla"].join(base, on=["batch", "seed"])
    return rest.assign(gain=rest.accuracy - rest.base)


def final_table(cells: pd.DataFrame) -> str:
    """The final runs as Markdown: means, standard deviations, and paired differences from vanilla."""
    final, differences = cells[~cells.tuning], gains(cells)
    lines = [
        "| arm | batch | seeds | test, % | minus vanilla, points | training images, % |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for (arm, batch), own in final.groupby(["arm", "batch"], sort=False):
        gain = differences[(differences.arm == arm) & (differences.batch == batch)].gain
        minus = "" if arm == "vanilla" else _spread(gain, "+").replace("-", "−")
        lines.append(f"| {arm} | {batch} | {len(own)} | {_spread(own.accuracy)} | {minus} | {own.train.mean():.1f} |")
    return "\n".join(lines) + "\n"


def _spread(values: pd.Series, sign: str = "") -> str:
    """A mean and, of several values, their standard deviation."""
    return f"{values.mean():{sign}.2f}" + (f" ± {values.std():.2f}" if len(values) > 1 else "")


def answer(cells: pd.DataFrame) -> str:
    """The first question, in one sentence: the tested difference, with what was written down before."""
    differences = gains(cells)
    gain = differences[(differences.arm == TESTED) & (differences.batch == LARGEST)].gain
    low, high = interval(gain)
    p = stats.ttest_1samp(gain, 0).pvalue
    bound = stats.t.interval(0.9, len(gain) - 1, gain.mean(), stats.sem(gain))[0]
    worse = "no worse than" if bound > -MARGIN else "not shown to be no worse than"
    text = (
        f"{TESTED} minus vanilla at batch {LARGEST}: {gain.mean():+.2f} points (95 % interval {low:+.2f} to {high:+.2f}"
    )
    return f"{text}, p = {p:.3f}, {len(gain)} seeds): {worse} vanilla within {MARGIN} points\n".replace("-", "−")


def draw(cells: pd.DataFrame, out: Path) -> None:
    """Draw every seed hollow and means filled: left by batch, right all arms at the largest batch."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "batch"  # the same file from the same results
    final = cells[~cells.tuning]
    with matplotlib.rc_context({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 10.5}):
        figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
        for arm, colour, shift in (("vanilla", GREY, 0.97), (TESTED, BLUE, 1.03)):
            own = final[final.arm == arm]
            left.scatter(own.batch * shift, own.accuracy, s=20, facecolors="none", edgecolors=colour, linewidths=0.9)
            means = own.groupby("batch").accuracy.mean()
            left.plot(means.index * shift, means, "D-", color=colour, ms=5, linewidth=1.2, label=arm)
        batches = sorted(final.batch.unique())
        left.set_xscale("log")
        left.set_xticks(batches, [str(batch) for batch in batches])
        left.minorticks_off()
        left.set_xlabel("images per step")
        left.set_ylabel("test accuracy, %")
        left.legend(frameon=False)
        left.set_title("By batch", loc="left")
        _draw_arms(right, gains(cells))
        for axis in (left, right):
            axis.grid(color="#d9dde3", linewidth=0.6)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _draw_arms(axis: Any, differences: pd.DataFrame) -> None:
    """Each arm's differences from vanilla at the largest batch; the tested one has its 95 % interval."""
    own = differences[differences.batch == LARGEST]
    order = own.groupby("arm").gain.mean().sort_values()
    for place, arm in enumerate(order.index):
        values = own[own.arm == arm].gain
        colour = BLUE if arm == TESTED else GREY
        axis.scatter(values, [place] * len(values), s=20, facecolors="none", edgecolors=colour, linewidths=0.9)
        axis.plot([values.mean()], [place], "D", color=colour, ms=5)
        if arm == TESTED:
            axis.plot(interval(values), [place] * 2, color=colour, linewidth=2.2, alpha=0.55)
    axis.set_yticks(range(len(order)), order.index)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_xlabel("test accuracy minus vanilla's of the same seed, points")
    axis.set_title(f"Batch {LARGEST}", loc="left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    cells = read(given.results)
    print(tuning_table(cells))
    if not cells.tuning.all():
        print(final_table(cells))
    if (cells[~cells.tuning].groupby(["arm", "batch"]).size().get((TESTED, LARGEST), 0)) > 1:
        print(answer(cells))
    if given.figure:
        draw(cells, given.figure)


if __name__ == "__main__":
    main()
